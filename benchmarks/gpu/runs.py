"""How steps are timed: until their tokens are read, back to back, and on the device alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.card import Card, Ceilings
from benchmarks.gpu.weights import RandomWeights
from twostroke.backends.interface import PAGE, Backend, DrawnTokens, RaggedBatch
from twostroke.engine.calibration import StepBench
from twostroke.engine.model import Model
from twostroke.engine.model_loader import new_pool
from twostroke.errors import InvalidRequest
from twostroke.kv.geometry import Geometry
from twostroke.models.cost import CostModel, SequenceRows

ENOUGH_S = 0.5  # of repeats of one kind
AHEAD_MS = 100.0  # the most that the host runs ahead of the device
FINITE = 64  # bytes below it make finite scales of codes
Step = Sequence[Sequence[SequenceRows]]  # the passes of a step; a decode step is one, a chunked prefill several

DEFINITIONS = {
    "step_ms": "median wall time of a step, or of a whole prefill, until its tokens are read",
    "back_to_back_ms": "wall time of many in a row / their number; no tokens are read in between",
    "device_ms": "median time between events around it, launched while the device was kept busy before",
    "outside": "1 - device_ms / step_ms",
    "bytes, flops": "weights and KV that a step reads, and its operations (twostroke/models/cost.py); sums over passes",
    "intensity": "flops / bytes",
    "floor_ms": "sum over its passes of the larger of bytes / copy bandwidth and flops / best rate of torch.matmul",
    "of_floor": "floor_ms / step_ms",
    "ceilings": "measured in the same run: device-to-device copy, bytes read plus written; torch.matmul in bf16",
    "first_s": "the first run of the case: compiling and capturing",
}


def random_model(backend: Backend, weights: RandomWeights, page_size: int) -> Model:
    """A model of random weights with a pool of one page: its steps are timed over other memory (`StepBench`)."""
    config, matrices = weights.config, weights.matrices()
    if (reason := backend.unsupported(config, matrices, page_size)) is not None:
        raise InvalidRequest(f"the {backend.name} backend cannot run this: {reason}")
    geometry = Geometry.of(config, backend.kv_dtype, tokenizer="")
    cost = CostModel(config, {name: backend.weight_bytes(one) for name, one in matrices.items()}, geometry.entry_bytes)
    pool = new_pool(geometry, 1, page_size, backend)
    tokenizer: Any = None  # nothing is read or written as text
    return Model(config.architecture, "", backend, backend.compile(config, weights), tokenizer, pool, None, cost)


class Runs:
    """Steps that are prepared, and launched in turn: what is timed is the backend, not the making of batches."""

    def __init__(self, bench: StepBench, steps: Sequence[Step], follows: bool) -> None:
        """`follows`: whether a step can take the tokens of the one before, of as many sequences."""
        self.bench, self.steps, self.follows = bench, steps, follows
        places = np.random.default_rng(0).permutation(bench.snapshots)  # pages lie anywhere, as in service
        self.fresh = [[scattered(bench.batch(rows), places) for rows in step] for step in steps]
        self.following = [[following(batch) for batch in step] for step in self.fresh if follows]
        self._number = 0

    def launch(self, drawn: DrawnTokens | None = None) -> DrawnTokens:
        """Launch the next step; `drawn` has the tokens of the one before."""
        follows = self.follows and drawn is not None
        batches = self.following if follows else self.fresh
        made: DrawnTokens | None = None
        for batch in batches[self._number % len(batches)]:
            made = self.bench.launch(replace(batch, drawn=drawn if follows else None, scratch={}))
        self._number += 1
        assert made is not None
        return made

    def step(self) -> None:
        """Launch the next step and read its tokens."""
        self.launch().read()

    def work(self) -> list[tuple[float, float]]:
        """(bytes of weights and KV that it reads, FLOPs) of each pass of the middle step."""
        each = [self.bench.model.cost.work(rows) for rows in self.steps[len(self.steps) // 2]]
        return [
            (one.weight_bytes + one.kv_bytes, one.linear_flops + one.attention_flops + one.head_flops) for one in each
        ]


def fill(bench: StepBench) -> None:
    """Random entries in all of its memory: attention over zeros would be a special case."""
    for storage in bench.memory.storages:
        if isinstance(storage, np.ndarray):
            storage[:] = np.random.default_rng(0).standard_normal(storage.shape, np.float32).astype(storage.dtype)
        elif storage.is_floating_point():
            storage.normal_()
        else:
            storage.random_(0, FINITE)


def scattered(batch: RaggedBatch[np.ndarray], places: np.ndarray) -> RaggedBatch[np.ndarray]:
    """The same step over pages in other frames."""
    tables = [np.concatenate([one[:, :PAGE], places[one[:, PAGE:]]], 1, dtype=np.int32) for one in batch.tables]
    return replace(batch, pages=places[batch.pages], tables=tables)


def following(batch: RaggedBatch[np.ndarray]) -> RaggedBatch[np.ndarray]:
    """The same step with the tokens of the one before, of as many sequences."""
    return replace(batch, token_ids=-1 - np.arange(batch.num_rows))


def timed(card: Card, runs: Runs, repeats: int, ceilings: Ceilings) -> dict[str, Any]:
    """The figures of `DEFINITIONS`, from at most `repeats` steps of each kind."""
    (first,) = card.wall(runs.step, 1)
    warm = first if card.on_cpu else card.wall(runs.step, 2)[1]
    least = 1 if card.on_cpu else 3
    repeats = max(least, min(repeats, int(ENOUGH_S / warm)))
    taken = card.wall(runs.step, repeats)
    step_s = median(taken)
    on_device = card.on_device(runs.launch, min(2e3 * step_s, AHEAD_MS) + 1, max(least, repeats // 2))
    drawn = runs.launch()
    card.wait()
    began = time.perf_counter()
    for _ in range(repeats):
        drawn = runs.launch(drawn)
    drawn.read()
    card.wait()
    in_a_row = (time.perf_counter() - began) / repeats
    work = runs.work()
    size, flops = (sum(one) for one in zip(*work, strict=True))
    floor = sum(max(size / ceilings.bandwidth, flops / ceilings.flops) for size, flops in work)
    return {
        "step_ms": 1e3 * step_s,
        "back_to_back_ms": 1e3 * in_a_row,
        "device_ms": 1e3 * median(on_device),
        "outside": 1 - median(on_device) / step_s,
        "bytes": size,
        "flops": flops,
        "intensity": flops / size,
        "bytes_per_second": size / step_s,
        "flops_per_second": flops / step_s,
        "floor_ms": 1e3 * floor,
        "of_floor": floor / step_s,
        "first_s": first,
        "raw_step_s": taken,
        "raw_device_s": on_device,
    }
