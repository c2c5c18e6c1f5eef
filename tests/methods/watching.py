"""Observation of a technique: the results of its strokes, beside its tokens."""

from typing import Any

import pytest

from tests.watching import watched
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decoded, Prefill, Prefilled, Program
from twostroke.kv.cache import KVCache
from twostroke.methods import Method, Prompt
from twostroke.sampling.params import SamplingParams

needs_native = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native: {library.unavailable()}")
PROMPT = [5, 9, 17, 33, 65, 129, 200, 11, 4, 7, 250, 3, 90, 21, 8, 77, 41, 30, 12]


def runs_of(llm: LLM, method: Method, prompt: list[int], **sampling: Any) -> tuple[list[int], list[Decoded], Any]:
    """(tokens, the runs of its decodes, the result of its program) of a technique."""
    runs: list[Decoded] = []

    def see(made: Any) -> None:
        if isinstance(made, Decoded):
            runs.append(made)

    fields: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    params = SamplingParams(**(fields | sampling))
    asked = Prompt(prompt, llm.tokenizer)
    request = Request(lambda: watched(lambda: method.program(asked), see), params, llm.tokenizer, len(prompt))
    llm.engine.finish([llm.engine.submit(request)])
    return [token.id for token in request.events], runs, request.result


def queried(llm: LLM, ids: list[int], count: int, after: KVCache | None = None) -> Prefilled:
    """A prefill that returns the queries of its last `count` tokens."""

    def program() -> Program:
        return (yield Prefill(ids, after, queries=count))

    request = Request(program, SamplingParams(), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    return request.result
