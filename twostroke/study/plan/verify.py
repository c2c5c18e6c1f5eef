"""Whether predictions hold: the engine on this machine, measured at cells that no calibration has seen.

Steps and requests are timed for the prediction (`timed.py`), and cells are measured, in turn, round by round; medians
count. So a machine that changes its speed changes it for all of them. No measurement of a cell enters a prediction.
Prompts are new each time. Each of several sequences has KV pages of its own.
"""

import io
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.stream import StreamReader
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.cost import SequenceRows
from twostroke.sampling.params import SamplingParams
from twostroke.study.plan.verification_cells import VerificationCell
from twostroke.study.simulate.model_timing import LatencyModel, ModelTimer, generate, random_prompt
from twostroke.system.machine import busy_seconds

LIMIT = 0.10  # mean absolute error of TTFT, and of ITL, that is promised
TOKENS = 12  # that each sequence of a decode cell makes; the first two gaps are not counted
MAX_ROUNDS = 7
QUIET = 0.10  # of a core: what other processes may use while times count


@dataclass
class CellResult:
    """One figure of a cell: "TTFT" or "ITL", in seconds. `measured` has one value for each round."""

    cell: VerificationCell
    figure: str
    predicted: float
    measured: list[float] = field(default_factory=list[float])

    @property
    def median(self) -> float | None:
        return median(self.measured) if self.measured else None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None if it was not measured."""
        return None if self.median is None else self.predicted / self.median - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "cell": self.cell.name,
            **asdict(self.cell),
            "figure": self.figure,
            "predicted_s": self.predicted,
            "measured_s": self.median,
            "error": self.error,
            "raw_s": self.measured,
        }


@dataclass
class Verification:
    """One model's results."""

    model: str
    results: list[CellResult]
    timed: LatencyModel  # what predictions were made with
    unsteadiness: float = 0.0  # by how much a decode step differed between rounds, of its median
    others: float = 0.0  # processor time of other processes, of a core, while it ran
    # cells that were not measured, each with its reason
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0

    def error(self, figure: str) -> float | None:
        """Mean absolute relative error of TTFT or ITL; None if none was measured."""
        errors = [abs(one.error) for one in self.results if one.figure == figure and one.error is not None]
        return mean(errors) if errors else None

    @property
    def holds(self) -> bool:
        """Whether both were measured, and both errors are within the limit."""
        errors = self.error("TTFT"), self.error("ITL")
        return all(error is not None and error <= LIMIT for error in errors)

    @property
    def quiet(self) -> bool:
        return self.others <= QUIET

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "ttft_error": self.error("TTFT"),
            "itl_error": self.error("ITL"),
            "limit": LIMIT,
            "holds": self.holds,
            "unsteadiness": self.unsteadiness,
            "others_cpu": self.others,
            "seconds": self.seconds,
            "engine_adds_s": {
                "step": self.timed.step_s,
                "token": self.timed.token_s,
                "prompt_token": self.timed.entered_s,
                "request": self.timed.request_s,
            },
            "prices": self.timed.predictor.prices,
            "cells": [one.as_dict() for one in self.results],
            "left_out": self.left_out,
        }


def verify(
    name: str,
    cells: Sequence[VerificationCell],
    seconds: float,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Open a model, calibrate, predict all cells, measure them for about so many seconds.

    Raises:
        InvalidRequest: no cell fits the model.
        The errors of `LLM`.
    """
    began, busy, mine = time.perf_counter(), busy_seconds(), time.process_time()
    progress("opening")
    checkpoint = open_checkpoint(name)
    fitting = [one for one in cells if one.longest <= checkpoint.config.max_position]
    if not fitting:
        raise InvalidRequest(f"{name} has {checkpoint.config.max_position} positions: too few for any cell")
    entry_bytes = 2 * 2 * sum(one.num_kv_heads * one.head_dim for one in checkpoint.config.attentions)
    room = entry_bytes * (2 * max(one.entries for one in fitting) + max(one.longest for one in fitting))
    with LLM(checkpoint, threads=threads, kv_bytes=room) as llm:
        progress("timing")
        timing = ModelTimer(llm)
        timing.round()
        made = Verification(name, _predictions(timing.result(), fitting), timing.result())
        made.left_out = {one.name: "longer than the model's context" for one in cells if one not in fitting}
        _rounds(llm, timing, made, fitting, began, seconds, progress)
        made.timed = timing.result()
        for old, new in zip(made.results, _predictions(made.timed, fitting), strict=True):
            old.predicted = new.predicted
        made.unsteadiness = timing.unsteadiness
    made.seconds = time.perf_counter() - began
    made.others = max(0.0, busy_seconds() - busy - (time.process_time() - mine)) / made.seconds
    return made


def _predictions(timed: LatencyModel, cells: Sequence[VerificationCell]) -> list[CellResult]:
    return [CellResult(cell, figure, value) for cell in cells for figure, value in predict(timed, cell).items()]


def predict(timed: LatencyModel, cell: VerificationCell) -> dict[str, float]:
    """Predicted seconds of a cell, by figure."""
    others = [SequenceRows(1, cell.context + 3, 1)] * cell.batch
    if cell.kind == "prefill":
        return {"TTFT": timed.ttft(cell.prompt, cell.budget)}
    if cell.kind == "decode":
        return {"ITL": timed.itl(cell.batch, cell.context + TOKENS // 2 + 1)}
    steps = timed.prefill(cell.prompt, cell.budget, others)
    return {"TTFT": timed.request_s + sum(steps), "ITL": mean(steps)}


def _rounds(
    llm: LLM,
    timing: ModelTimer,
    made: Verification,
    cells: Sequence[VerificationCell],
    began: float,
    seconds: float,
    progress: Callable[[str], None],
) -> None:
    """Measure cells in turn, the shortest first, while there is time: a cell that would end too late is left out.

    The first round may take half of the time again, so that a slow machine has results too.
    """
    random = np.random.default_rng()
    contexts = _Contexts(llm, random)
    taken: dict[VerificationCell, float] = {}
    ordered = sorted(cells, key=lambda cell: sum(one.predicted for one in made.results if one.cell == cell))
    for number in range(MAX_ROUNDS):
        deadline = began + seconds if number else max(began + seconds, time.perf_counter() + seconds / 2)
        measured = False
        for i, cell in enumerate(ordered, 1):
            now = time.perf_counter()
            if now + (taken.get(cell) or _expected(made, cell)) > deadline:
                continue
            progress(f"round {number + 1}, {i} of {len(ordered)}: {cell.name}")
            for figure, value in _measure(llm, contexts, random, cell).items():
                next(one for one in made.results if one.cell == cell and one.figure == figure).measured.append(value)
            taken[cell] = time.perf_counter() - now
            measured = True
        if not measured:
            break
        progress(f"round {number + 1}: timing")
        timing.round()
    made.left_out |= {cell.name: "no time was left" for cell in cells if cell not in taken}


def _expected(made: Verification, cell: VerificationCell) -> float:
    """Seconds that a cell will take the first time, about; its context may have to be computed too."""
    predicted = {one.figure: one.predicted for one in made.results if one.cell == cell}
    context = made.timed.ttft(cell.context, 512) if cell.context else 0.0
    return context + predicted.get("TTFT", 0.0) + (TOKENS * predicted["ITL"] if "ITL" in predicted else 0.0)


def _measure(llm: LLM, contexts: "_Contexts", random: np.random.Generator, cell: VerificationCell) -> dict[str, float]:
    with _budget(llm, cell.budget):
        if cell.kind == "prefill":
            (request,) = generate(llm, [random_prompt(llm, random, cell.prompt)], 1)
            return {"TTFT": request.timings.ttft or 0.0}
        if cell.kind == "decode":
            requests = contexts.requests(cell, TOKENS)
            llm.engine.run(requests)
            return {"ITL": median(gap for one in requests for gap in one.timings.itls[2:])}
        return _mixed(llm, contexts, random_prompt(llm, random, cell.prompt), cell)


def _mixed(llm: LLM, contexts: "_Contexts", prompt: list[int], cell: VerificationCell) -> dict[str, float]:
    """A prompt that comes when all others decode: its TTFT, and the mean of their gaps until its first token."""
    steps = -(-cell.prompt // max(1, cell.budget - cell.batch))
    others = contexts.requests(cell, steps + 8)
    engine = llm.engine
    (newcomer,) = llm.requests([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    try:
        for one in others:
            engine.submit(one)
        while not all(len(one.timings.tokens) >= 3 for one in others):
            engine.step()
        newcomer.timings.arrival = time.perf_counter()
        engine.submit(newcomer)
        while not newcomer.done:
            engine.step()
    finally:
        for one in (newcomer, *others):
            engine.cancel(one)
    first = newcomer.timings.tokens[0]
    began = newcomer.timings.arrival
    # Gaps that end with a step of the prefill; the first one begins before the arrival, by less than a plain step.
    inside = [
        gap
        for one in others
        for gap, at in ((after - before, after) for before, after in pairwise(one.timings.tokens))
        if began < at <= first + 1e-3
    ]
    return {"TTFT": first - began, "ITL": mean(inside)}


class _Contexts:
    """Values of any length and number, with pages of their own. One long prompt is computed once, in parts."""

    def __init__(self, llm: LLM, random: np.random.Generator) -> None:
        self._llm, self._random = llm, random
        self._longest: KVCache | None = None

    def requests(self, cell: VerificationCell, tokens: int) -> list[Request]:
        """Requests that continue values of the cell's context, and make so many tokens."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return [self._llm.decode_request(value, params) for value in self._values(cell.batch, cell.context)]

    def _values(self, count: int, entries: int) -> Iterator[KVCache]:
        known = 0 if self._longest is None else len(self._longest)
        if self._longest is None or known < entries - 1:
            more = random_prompt(self._llm, self._random, entries - 1 - known)
            self._longest = self._llm.prefill(more, after=self._longest)
        out = io.BytesIO()
        self._longest[: entries - 1].write_to(out)
        data = out.getvalue()
        for _ in range(count):
            copy = KVCache.read_from(StreamReader(io.BytesIO(data), Path("memory"), len(data)), self._llm.pool)
            # The last entry is computed, so that there is a row to make a token from.
            yield self._llm.prefill(random_prompt(self._llm, self._random, 1), after=copy)


@contextmanager
def _budget(llm: LLM, tokens: int) -> Generator[None]:
    """A step's token budget for a while."""
    before = llm.engine.config
    llm.engine.config = replace(before, max_step_tokens=tokens)
    try:
        yield
    finally:
        llm.engine.config = before
