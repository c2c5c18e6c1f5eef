"""Strokes accept values with pages in any tier, and the answers are the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twostroke.api.llm import LLM
from twostroke.backends.interface import PAGE
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.kv.tier_moves import spill
from twostroke.sampling.params import SamplingParams

PROMPT = list(range(3, 60))
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}


@pytest.fixture
def llm(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(prefix_index="off")


def ids(llm: LLM, kv: KVCache, **options: Any) -> list[int]:
    return [token.id for token in llm.decode(kv, **OPTIONS | options)]


@pytest.mark.parametrize("cut", [lambda kv: kv, lambda kv: kv[5:], lambda kv: kv[:4] + kv[20:], lambda kv: kv[:-3]])
def test_a_stroke_brings_a_value_back(llm: LLM, cut: Callable[[KVCache], KVCache]) -> None:
    kv = cut(llm.prefill(PROMPT))
    expected, continued = ids(llm, kv), llm.prefill([7, 8, 9], after=kv).entries()
    host = kv.to("host")
    del kv
    assert llm.pool.num_used == 0
    assert ids(llm, host) == expected
    assert llm.pool.num_used == 0
    longer = llm.prefill([7, 8, 9], after=host)
    assert np.array_equal(longer.entries(), continued)
    assert (longer.tier, host.tier) == ("pool", "host")


@pytest.mark.parametrize("index", ["off", "radix"])
def test_a_program_moves_its_values_as_it_likes(tiny_llm: Callable[..., LLM], index: str) -> None:
    llm = tiny_llm(prefix_index=index)

    def program(move: Callable[[KVCache], KVCache]) -> Callable[[], Program]:
        def strokes() -> Program:
            kv = move((yield Prefill(PROMPT)))
            run = yield Decode(kv, max_tokens=4)
            aside = move(run.kv)
            run = yield Decode(move(kv[:4] + aside[9:]), max_tokens=5)
            return move(run.kv)

        return strokes

    results = []
    for move in (lambda kv: kv, lambda kv: kv.to("host"), lambda kv: kv.to("host").to("pool")):
        request = Request(program(move), SamplingParams(max_tokens=40, ignore_eos=True), llm.tokenizer)
        llm.engine.finish([llm.engine.submit(request)])
        results.append(([token.id for token in request.events], request.result.tokens, request.result.entries()))
        del request
    for other in results[1:]:
        assert other[:2] == results[0][:2]
        assert np.array_equal(other[2], results[0][2])
    if llm.model.index is not None:
        llm.model.index.clear()
    assert (llm.pool.num_used, llm.pool.num_copies) == (0, 0)


def test_pages_leave_between_steps_and_no_program_notices(llm: LLM) -> None:
    """All pages except those of running strokes are moved out after every step."""
    kv = llm.prefill(PROMPT)
    expected = ids(llm, kv), ids(llm, kv[:4] + kv[20:])

    def program() -> Program:
        kept = yield Prefill(PROMPT)
        run = yield Decode(kept[:30], max_tokens=6)
        yield Decode(kept, max_tokens=9)
        return len(run.tokens)

    request = Request(program, SamplingParams(max_tokens=40, ignore_eos=True), llm.tokenizer)
    llm.engine.submit(request)
    spilled = 0
    while not request.done:
        llm.engine.step()
        spilled += spill(llm.pool, np.arange(llm.pool.num_held))
    assert spilled > 8
    assert [token.id for token in request.events][6:] == expected[0]
    request.events.clear()
    assert llm.pool.frame(int(kv.table[0, PAGE])) < 0
    assert (ids(llm, kv), ids(llm, kv[:4] + kv[20:])) == expected


def test_coming_back_waits_its_turn(tiny_llm: Callable[..., LLM]) -> None:
    """A value that does not fit beside running requests is brought back when there is room."""
    page_bytes = tiny_llm().pool.page_bytes
    llm = tiny_llm(prefix_index="off", kv_bytes=8 * page_bytes)
    host = llm.prefill(PROMPT).to("host")
    expected = ids(llm, host)
    busy = llm.request(list(range(9, 90)), SamplingParams(max_tokens=20, ignore_eos=True))
    llm.engine.submit(busy)
    llm.engine.step()
    assert ids(llm, host) == expected
    llm.engine.finish([busy])
    assert llm.engine.preemptions > 0
    assert len(busy.events) == 20
