"""Measures how long a model's steps take on this machine."""

import logging
import time
from collections.abc import Sequence

import numpy as np

from twostroke.backends.hidden_inputs import HiddenInputs
from twostroke.backends.interface import DrawnTokens, RaggedBatch, StateStep
from twostroke.engine.model import Model
from twostroke.engine.model_loader import new_pool
from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import StepPredictor
from twostroke.sampling.draw import NO_NOISE, Draw
from twostroke.sampling.params import SamplingParams

log = logging.getLogger(__name__)

LONG_STEP_S, MAX_ROWS = 0.06, 256  # chunks double until a step takes this many seconds or has this many rows
SEQUENCES = 16  # most of a step
MAX_CONTEXT, MAX_CONTEXT_BYTES = 2048, 64 << 20  # limits of the context: KV entries, bytes
ROUNDS, MORE_ROUNDS, ENOUGH_S = 3, 5, 1.0  # repeats of each step; repeats up to MORE_ROUNDS while under ENOUGH_S
GREEDY = SamplingParams(max_tokens=None, ignore_eos=True)
NO_TOKENS = np.zeros(0, np.int64)


def calibrate(model: Model) -> StepPredictor:
    """Time a few steps of the model over separate KV memory: the pool's pages are not touched.

    The steps are one row, without and with logits; eight sequences that make a token; chunks of 4 rows, 16, 32 and so
    on; and, after a context of 2,048 entries (fewer if the model has fewer positions, or if they exceed 64 MiB), one
    row, 4 and the last chunk. Takes about a second, or as long as three rounds need. The quickest time of each step
    counts: delays from outside are not the cost of a row or a key, and `Forecast` follows the machine's load later.
    """
    began = time.perf_counter()
    entry_bytes, longest = model.pool.entry_bytes, model.max_position
    context = max(0, min(MAX_CONTEXT, longest - MAX_ROWS, MAX_CONTEXT_BYTES // entry_bytes))
    bench = StepBench(model, context + MAX_ROWS)
    few = min(4, longest)
    steps: list[list[SequenceRows]] = [
        [SequenceRows(1)],
        [SequenceRows(1, 0, 1)],
        [SequenceRows(1, 0, 1)] * 8,
        [SequenceRows(few)],
        [SequenceRows(1, context)],
    ]
    chunk = min(16, longest)
    while bench.quickest([SequenceRows(chunk)]) < LONG_STEP_S and 2 * chunk <= min(MAX_ROWS, longest):
        steps.append([SequenceRows(chunk)])
        chunk *= 2
    steps += [
        [SequenceRows(chunk)],
        [SequenceRows(chunk, min(context, longest - chunk))],
        [SequenceRows(few, min(context, longest - few))],
    ]
    taken: list[list[float]] = [[] for _ in steps]
    for number in range(MORE_ROUNDS):
        if number < ROUNDS or time.perf_counter() - began < ENOUGH_S:
            for step, times in zip(steps, taken, strict=True):
                times.append(bench.seconds(step))
    predictor = StepPredictor.fit(model.cost, [(step, min(times)) for step, times in zip(steps, taken, strict=True)])
    log.info(
        "calibrated %s in %.1f s: %.1f ms for one row, %.1f ms for %d",
        model.name,
        time.perf_counter() - began,
        1e3 * predictor.seconds([SequenceRows(1)]),
        1e3 * predictor.seconds([SequenceRows(chunk)]),
        chunk,
    )
    return predictor


class StepBench:
    """Times steps of any shape over zeroed pages that belong to no pool in use."""

    def __init__(self, model: Model, entries: int) -> None:
        """`entries`: the most that all sequences of a step have, besides a page for each of them."""
        self.model = model
        self.size = model.pool.page_size
        self.groups = model.pool.num_groups
        self.snapshots = self.groups * (-(-entries // self.size) + SEQUENCES)  # their first frame
        self.snapshot_pages = model.pool.snapshot_pages
        pages = self.snapshots + 2 * SEQUENCES * self.snapshot_pages
        self.memory = new_pool(model.pool.geometry, pages, self.size, model.backend).memory
        # Write the zeros: untouched memory maps to one shared zero page, which always hits the cache.
        for storage in self.memory.storages:
            storage[:] = 0
        self.seconds([SequenceRows(1)])  # the first step of a process also allocates

    def seconds(self, step: Sequence[SequenceRows]) -> float:
        batch = self.batch(step)
        began = time.perf_counter()
        self.launch(batch).read()
        self.memory.storages[0][0, 0, 0, 0, 0, 0].item()  # wait for an asynchronous device
        return time.perf_counter() - began

    def quickest(self, step: Sequence[SequenceRows]) -> float:
        return min(self.seconds(step) for _ in range(2))

    def launch(self, batch: RaggedBatch[np.ndarray]) -> DrawnTokens:
        """A pass and its sampling, as the engine calls them; the tokens are not read."""
        rows = self.model.compiled.forward(batch, self.memory).logits
        draws = [Draw(GREEDY, NO_NOISE, 0, NO_TOKENS, ()) for _ in range(len(rows))]
        return self.model.compiled.sample([rows[i : i + 1] for i in range(len(rows))], draws)

    def batch(self, step: Sequence[SequenceRows]) -> RaggedBatch[np.ndarray]:
        """Each sequence has pages of its own, as in service: entries that are read twice would be in the cache."""
        positions = np.concatenate([np.arange(rows.context, rows.context + rows.count) for rows in step])
        ends = np.cumsum([0, *(rows.count for rows in step)])
        first_pages = np.cumsum([0, *(self._pages(rows) for rows in step)])
        wanted = [np.arange(end - rows.logits, end) for rows, end in zip(step, ends[1:], strict=True)]
        return RaggedBatch(
            # Unlike tokens: rows that are all the same would choose the same experts.
            token_ids=(positions * 7919 + 1) % self.model.config.vocab_size,
            positions=positions,
            pages=self._frames(positions // self.size + np.repeat(first_pages[:-1], [rows.count for rows in step])).T,
            slots=positions % self.size,
            row_starts=ends.tolist(),
            tables=[self._table(rows, first) for rows, first in zip(step, first_pages, strict=False)],
            wanted=np.concatenate(wanted),
            states=[self._state(rows, i) for i, rows in enumerate(step)] if self.snapshot_pages else [],
            hidden=self._hidden(len(positions)) if self.model.config.takes_hidden else None,
        )

    def _hidden(self, rows: int) -> HiddenInputs:
        """Hidden states for a head of multi-token prediction."""
        size = self.model.config.hidden_size
        return HiddenInputs(np.ones((rows, size), np.float32), np.ones(rows, np.bool_))

    def _state(self, rows: SequenceRows, sequence: int) -> StateStep:
        """The snapshot that a sequence reads, and the last that it makes."""
        chunk, first = self.model.pool.geometry.chunk, self.snapshots + 2 * sequence * self.snapshot_pages
        frames = np.arange(first, first + 2 * self.snapshot_pages, dtype=np.int32).reshape(2, -1)
        last = (rows.context + rows.count) // chunk * chunk - rows.context  # rows before the last boundary
        source = frames[0] if rows.context >= chunk else frames[0, :0]
        return StateStep(rows.context % chunk, source, [(last, frames[1])] if last > 0 else [])

    def _pages(self, rows: SequenceRows) -> int:
        return -(-(rows.context + rows.count) // self.size)

    def _table(self, rows: SequenceRows, first_page: int) -> np.ndarray:
        first = np.arange(0, rows.context + rows.count, self.size)
        stop = np.minimum(rows.context + rows.count - first, self.size)
        spans = np.stack([np.zeros_like(first), stop, first], 1)
        return np.concatenate([spans, self._frames(first_page + first // self.size)], 1, dtype=np.int32)

    def _frames(self, pages: np.ndarray) -> np.ndarray:
        """The frames of each page's groups of layers, [n, groups]."""
        return pages[:, None] * self.groups + np.arange(self.groups)
