"""One model timed on this machine: prices of its steps, and what the engine adds to them.

Steps are timed over separate KV memory (`engine/calibration.py`), at more shapes than an engine needs for its
objective. Then a few requests tell what lies outside the kernels: a step, a token of it, and a request each add a time
of their own. Shapes and lengths that are timed here are never among those that `cells.py` verifies.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from twostroke.engine.calibration import StepBench
from twostroke.engine.model import Model
from twostroke.engine.request import Request
from twostroke.llm import LLM
from twostroke.models.cost import Predictor, Rows, nonnegative_least_squares
from twostroke.sampling.params import SamplingParams

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS, CHUNKS = (1024, 4096), (1, 4, 16, 64, 256, 512)
BATCHES = ((2, 64), (4, 64), (16, 64), (4, 1024), (12, 512), (4, 4096))  # (sequences that make a token, context)
PROMPTS, DECODES = (48, 96, 600), (1, 8)  # of the requests
TOKENS = 12
LEAST_ROUNDS, MOST_ROUNDS = 2, 9
LONG_S = 8.0  # a step that would take longer is not timed


@dataclass(frozen=True)
class Timed:
    """Predicts steps, TTFT and ITL of one model.

    Attributes:
        predictor: seconds of a step's kernels.
        step_s, token_s: what the engine adds to a step, and for each token that it makes.
        entered_s: for each token of a prompt.
        request_s: from the arrival of a request to its first step, and back from its first token.
    """

    predictor: Predictor
    step_s: float = 0.0
    token_s: float = 0.0
    entered_s: float = 0.0
    request_s: float = 0.0

    def seconds(self, step: Sequence[Rows]) -> float:
        """A step of the engine."""
        made = sum(one.logits for one in step)
        entered = sum(one.count for one in step) - made
        return self.predictor.seconds(step) + self.step_s + made * self.token_s + entered * self.entered_s

    def prefill(self, prompt: int, budget: int, others: Sequence[Rows] = ()) -> list[float]:
        """Seconds of each step of a prefill, of at most `budget` tokens with one of each other sequence."""
        chunk, taken = max(1, budget - len(others)), list[float]()
        for start in range(0, prompt, chunk):
            count = min(chunk, prompt - start)
            grown = [Rows(1, one.context + len(taken), 1) for one in others]
            taken.append(self.seconds([Rows(count, start, int(start + count == prompt)), *grown]))
        return taken

    def ttft(self, prompt: int, budget: int, others: Sequence[Rows] = ()) -> float:
        """From arrival to first token where nobody waits before it."""
        return self.request_s + sum(self.prefill(prompt, budget, others))

    def itl(self, batch: int, context: int) -> float:
        """Between two tokens of each of `batch` sequences with `context` entries."""
        return self.seconds([Rows(1, context, 1)] * batch)


def time_model(llm: LLM, seconds: float, progress: Callable[[str], None] = lambda _: None) -> Timed:
    """Time an opened model for about so many seconds; every shape at least twice, however long that takes."""
    progress("timing steps")
    predictor = _time_steps(llm.model, 0.75 * seconds)
    progress("timing requests")
    return _time_requests(llm, predictor, 0.25 * seconds)


def _time_steps(model: Model, seconds: float) -> Predictor:
    longest = model.max_position
    contexts = [one for one in CONTEXTS if one + CHUNKS[-1] <= longest]
    steps = [[Rows(count)] for count in ROWS if count <= longest]
    steps += [[Rows(1, 0, 1)], *([Rows(1, context, 1)] * batch for batch, context in BATCHES if context < longest)]
    steps += [[Rows(count, context)] for context in contexts for count in CHUNKS]
    bench = StepBench(model, max(sum(one.context + one.count for one in step) for step in steps))
    began = time.perf_counter()
    taken = [[bench.seconds(step)] for step in steps]  # the first time is not counted where there are others
    kept = [(step, times) for step, times in zip(steps, taken, strict=True) if times[0] < LONG_S]
    for number in range(MOST_ROUNDS):
        if number < LEAST_ROUNDS or time.perf_counter() - began < seconds:
            for step, times in kept:
                times.append(bench.seconds(step))
    return Predictor.fit(model.cost, [(step, median(times[1:])) for step, times in kept])


def _time_requests(llm: LLM, predictor: Predictor, seconds: float) -> Timed:
    """Fit what the engine adds to the kernels' predicted seconds, by least squares and never below 0."""
    random = np.random.default_rng(0)
    budget = llm.engine.config.max_step_tokens
    kernels = Timed(predictor)
    began, number = time.perf_counter(), 0
    ttfts: dict[int, list[float]] = {prompt: [] for prompt in PROMPTS if prompt + TOKENS < llm.max_model_len}
    gaps: dict[int, list[float]] = {batch: [] for batch in DECODES}
    while number < LEAST_ROUNDS + 1 or (number < MOST_ROUNDS and time.perf_counter() - began < seconds):
        for prompt, times in ttfts.items():
            (request,) = generate(llm, [random_prompt(llm, random, prompt)], 1)
            times.append(request.timings.ttft or 0.0)
        for batch, times in gaps.items():
            made = generate(llm, [random_prompt(llm, random, 16) for _ in range(batch)], TOKENS)
            times += [gap for one in made for gap in one.timings.itls[2:]]
        number += 1
    rows, rest = list[list[float]](), list[float]()  # of steps, tokens made, tokens entered, requests
    for prompt, times in ttfts.items():
        rows.append([-(-prompt // budget), 1, prompt, 1])
        rest.append(median(times[1:]) - kernels.ttft(prompt, budget))
    for batch, times in gaps.items():
        rows.append([1, batch, 0, 0])
        rest.append(median(times) - kernels.itl(batch, 16 + TOKENS // 2))
    scale = np.array([1.0, 8.0, 600.0, 1.0])
    step_s, token_s, entered_s, request_s = nonnegative_least_squares(np.array(rows) / scale, np.array(rest)) / scale
    return Timed(predictor, float(step_s), float(token_s), float(entered_s), float(request_s))


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
