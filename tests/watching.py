"""Observation of running programs."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Guesses, Program
from twostroke.kv.cache import KVCache

Answer = tuple[list[Token], list[str]]  # tokens, and the bits of their KV


def watched(make: Callable[[], Program], see: Callable[[Any], object]) -> Program:
    """Runs the program and calls see(result) with the result of each stroke."""
    program, results = make(), [None]  # popped, else values that the program drops would be kept
    while True:
        try:
            stroke = program.send(results.pop())
        except StopIteration as stop:
            return stop.value
        results.append((yield stroke))
        for result in results[0] if isinstance(results[0], list) else results:
            see(result)
        result = None  # else it would keep a value


class Bits:
    """The bits of all keys and values of a request's strokes, in order.

    Of a program that guesses they are the last one's: how many guesses it tries depends on what was said before.
    """

    def __init__(self, request: Request) -> None:
        self.seen: list[str] = []
        self._guesses = False
        self._make, request.make_program = request.make_program, self._program

    def _program(self) -> Program:
        self.seen.clear()  # a preempted program starts again
        return watched(self._make, self._see)

    def _see(self, result: Any) -> None:
        self._guesses = self._guesses or isinstance(result, Guesses)
        kv = result if isinstance(result, KVCache) else getattr(result, "kv", None)
        if kv is not None:
            layers = sorted(layer for _, group in kv.pool.geometry.kv_groups for layer in group.layers)
            held = [kv.entries(layer).tobytes() for layer in layers]
            held += [state.tobytes() for state in (kv.states() or {}).values()]
            if self._guesses:
                self.seen.clear()
            self.seen.append(hashlib.sha256(b"".join(held)).hexdigest())


def answers(llm: LLM, requests: list[Request], config: SchedulerConfig, steps: int = 0) -> list[Answer]:
    """The answers to requests that arrive `steps` steps apart."""
    llm.engine.config = config
    bits = [Bits(request) for request in requests]
    for request in requests:
        llm.engine.submit(request)
        for _ in range(steps):
            llm.engine.step()
    llm.engine.finish(requests)
    return [(list(request.events), kv.seen) for request, kv in zip(requests, bits, strict=True)]


def entered_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens of each forward pass from now on."""
    counts: list[int] = []
    forward = llm.model.compiled.forward

    def counted(batch: Any, memory: Any) -> Any:
        counts.append(batch.num_rows)
        return forward(batch, memory)

    monkeypatch.setattr(llm.model.compiled, "forward", counted)
    return counts
