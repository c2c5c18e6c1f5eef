"""One model timed on this machine: prices of its steps, and what the engine adds to them.

Steps are timed over separate KV memory (`engine/calibration.py`), at more shapes than an engine needs for its
objective. Then a few requests tell what lies outside the kernels: a step, a token of it, and a request each add a time
of their own. Shapes and lengths that are timed here are never among those that `plan/verification_cells.py` verifies.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.calibration import StepBench
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import StepPredictor, nonnegative_least_squares
from twostroke.sampling.params import SamplingParams
from twostroke.study.roofline.model_spec import ModelSpec, kv_format_of
from twostroke.study.simulate.engine_setup import EngineSetup, HttpOverhead
from twostroke.study.simulate.step_costs import MeasuredCosts

SECONDS = 20.0  # that timing takes in all
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS, CHUNKS = (1024, 4096), (1, 4, 16, 64, 256)
BATCHES = ((2, 64), (4, 64), (16, 64), (4, 1024), (12, 512), (4, 4096))  # (sequences that make a token, context)
PROMPTS, DECODES = (48, 96, 600), (1, 8)  # of the requests
SHORT, TOKENS = 16, 12  # of the requests that decode
MIN_ROUNDS, MAX_ROUNDS = 2, 9
MAX_STEP_S = 8.0  # a step that would take longer is not timed


@dataclass(frozen=True)
class LatencyModel:
    """Predicts steps, TTFT and ITL of one model."""

    predictor: StepPredictor  # seconds of a step's kernels
    # step_s, token_s: what the engine adds to a step, and for each token that it makes
    step_s: float = 0.0
    token_s: float = 0.0
    entered_s: float = 0.0  # for each token of a prompt
    request_s: float = 0.0  # from the arrival of a request to its first step, and back from its first token

    def seconds(self, step: Sequence[SequenceRows]) -> float:
        made = sum(one.logits for one in step)
        entered = sum(one.count for one in step) - made
        return self.predictor.seconds(step) + self.step_s + made * self.token_s + entered * self.entered_s

    def prefill(self, prompt: int, budget: int, others: Sequence[SequenceRows] = ()) -> list[float]:
        """Seconds of each step of a prefill, of at most `budget` tokens with one of each other sequence."""
        chunk, taken = max(1, budget - len(others)), list[float]()
        for start in range(0, prompt, chunk):
            count = min(chunk, prompt - start)
            grown = [SequenceRows(1, one.context + len(taken), 1) for one in others]
            taken.append(self.seconds([SequenceRows(count, start, int(start + count == prompt)), *grown]))
        return taken

    def ttft(self, prompt: int, budget: int, others: Sequence[SequenceRows] = ()) -> float:
        """Seconds from arrival to first token of an uncontended request."""
        return self.request_s + sum(self.prefill(prompt, budget, others))

    def itl(self, batch: int, context: int) -> float:
        """Seconds between two tokens of each of `batch` sequences with `context` entries."""
        return self.seconds([SequenceRows(1, context, 1)] * batch)


def time_model(llm: LLM, seconds: float, progress: Callable[[str], None] = lambda _: None) -> LatencyModel:
    """Time an opened model for about so many seconds; every shape at least twice, however long that takes."""
    timing = ModelTimer(llm)
    time_rounds(timing, seconds, progress)
    return timing.result()


class ModelTimer:
    """Times of steps and requests, round by round; medians of all rounds are fitted."""

    def __init__(self, llm: LLM) -> None:
        """Takes each time once, which is not counted: much is allocated then."""
        # rounds: how many there were
        self._llm, self._random, self.rounds = llm, np.random.default_rng(0), 0
        longest = llm.model.max_position
        contexts = [one for one in CONTEXTS if one + CHUNKS[-1] <= longest]
        steps = [[SequenceRows(count)] for count in ROWS if count <= longest]
        steps += [
            [SequenceRows(1, 0, 1)],
            *([SequenceRows(1, context, 1)] * batch for batch, context in BATCHES if context < longest),
        ]
        steps += [[SequenceRows(count, context)] for context in contexts for count in CHUNKS]
        self._bench = StepBench(llm.model, max(sum(one.context + one.count for one in step) for step in steps))
        self._steps: list[tuple[list[SequenceRows], list[float]]] = [
            (step, []) for step in steps if self._bench.seconds(step) < MAX_STEP_S
        ]
        self._ttfts: dict[int, list[float]] = {one: [] for one in PROMPTS if one + TOKENS < llm.max_model_len}
        self._gaps: dict[int, list[float]] = {batch: [] for batch in DECODES}
        self._requests()
        for times in (*self._ttfts.values(), *self._gaps.values()):
            times.clear()

    def round(self) -> None:
        """Time everything once more."""
        for step, times in self._steps:
            times.append(self._bench.seconds(step))
        self._requests()
        self.rounds += 1

    def _requests(self) -> None:
        for prompt, times in self._ttfts.items():
            (request,) = generate(self._llm, [random_prompt(self._llm, self._random, prompt)], 1)
            times.append(request.timings.ttft or 0.0)
        for batch, times in self._gaps.items():
            prompts = [random_prompt(self._llm, self._random, SHORT) for _ in range(batch)]
            made = generate(self._llm, prompts, TOKENS)
            times.append(median(gap for one in made for gap in one.timings.itls[2:]))

    @property
    def unsteadiness(self) -> float:
        """Relative spread of decode-step times over rounds: (slowest - fastest) / median."""
        times = self._gaps[DECODES[0]]
        return (max(times) - min(times)) / median(times)

    def result(self) -> LatencyModel:
        """The model fitted to all rounds so far. There must be one at least."""
        return self._with_engine(self.kernels(self.rounds))

    def kernels(self, last: int) -> StepPredictor:
        """What the last rounds say of the kernels: a machine that others use is not the same from minute to minute."""
        return StepPredictor.fit(self._llm.model.cost, [(step, median(times[-last:])) for step, times in self._steps])

    def _with_engine(self, predictor: StepPredictor) -> LatencyModel:
        """Fit what the engine adds to the kernels' seconds: least squares of relative errors, and nothing below 0."""
        budget, kernels = self._llm.engine.config.max_step_tokens, LatencyModel(predictor)
        rows, rest = list[np.ndarray](), list[float]()
        for prompt, times in self._ttfts.items():
            taken = median(times)
            rows.append(np.array([-(-prompt // budget), 1, prompt, 1]) / taken)
            rest.append(1 - kernels.ttft(prompt, budget) / taken)
        for batch, times in self._gaps.items():
            taken = median(times)
            rows.append(np.array([1, batch, 0, 0]) / taken)
            rest.append(1 - kernels.itl(batch, SHORT + TOKENS // 2) / taken)
        amounts = np.array(rows)
        scale = amounts.max(0)
        added = nonnegative_least_squares(amounts / scale, np.array(rest)) / scale
        return LatencyModel(predictor, *added.tolist())


def random_prompt(llm: LLM, random: np.random.Generator, count: int) -> list[int]:
    """Ids of ordinary tokens, new every time, so that nothing of it is known."""
    special = set(llm.tokenizer.special_ids)
    ids: list[int] = []
    while len(ids) < count:
        ids += [one for one in random.integers(llm.config.vocab_size, size=count).tolist() if one not in special]
    return ids[:count]


def generate(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[Request]:
    """Answers of exactly `tokens` greedy tokens, all at once."""
    requests: list[Any] = llm.requests(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    llm.engine.run(requests)
    return requests


def time_rounds(timing: ModelTimer, seconds: float, progress: Callable[[str], None] = lambda _: None) -> None:
    """Time for about so many seconds; every shape at least twice."""
    began = time.perf_counter()
    while timing.rounds < MIN_ROUNDS or (timing.rounds < MAX_ROUNDS and time.perf_counter() - began < seconds):
        progress(f"timing, round {timing.rounds + 1}")
        timing.round()


def measured_setup(
    # name, weights, kv_bytes, page_size, index: as for `LLM`
    name: str,
    weights: str | None = None,
    kv_bits: int = 16,  # of a number in the KV cache, 16, 8 or 6
    kv_bytes: int | None = None,
    page_size: int = 16,
    index: str = "radix",
    scheduler: SchedulerConfig | None = None,  # limits of a step
    progress: Callable[[str], None] = lambda _: None,  # called with what is done now
) -> EngineSetup:
    """Open a model, time it, and close it again."""
    limits, stored = scheduler or SchedulerConfig(), kv_format_of(kv_bits)
    with LLM(
        name,
        weights=weights or "stored",
        kv_dtype=stored.name if kv_bits < 16 else "auto",
        kv_bytes=kv_bytes,
        page_size=page_size,
        prefix_index=index,
        max_step_tokens=limits.max_step_tokens,
    ) as llm:
        return setup_of(llm, time_model(llm, SECONDS, progress), index, limits, kv_bits, weights or "stored")


def setup_of(
    llm: LLM, timed: LatencyModel, index: str, scheduler: SchedulerConfig, kv_bits: int = 16, weights: str = "stored"
) -> EngineSetup:
    """The setup of an opened model that was timed."""
    return EngineSetup(
        model=ModelSpec(llm.name, llm.config, weights=weights).with_kv_bits(kv_bits),
        costs=MeasuredCosts(timed.predictor, timed.step_s, timed.token_s, timed.entered_s),
        pages=llm.pool.num_pages,
        page_size=llm.pool.page_size,
        index=index,
        asynchronous=llm.backend.asynchronous,
        scheduler=scheduler,
        http=HttpOverhead(timed.request_s),
    )
