"""Passages at other positions: K of a passage that is moved is that of one that was computed there, and joined passages
have the same bits under every schedule."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engine.any_schedule import PROMPT, AnySchedule
from tests.engine.test_kv_bits import CODED, KINDS
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams

needs_native = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
ANY = {(kind, dtype): AnySchedule(write, dtype) for kind, write in KINDS.items() for dtype in ("bfloat16", *CODED)}
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # largest relative error of one rounding
PARAMS = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
FIRST, SECOND, QUESTION = PROMPT[:37], PROMPT[60:111], PROMPT[150:159]


def computed_at(llm: LLM, tokens: list[int], position: int) -> KVCache:
    return llm.prefill(tokens, after=KVCache.empty(llm.pool).resumed_at(position))


def check_first_layer(llm: LLM, tokens: list[int], position: int) -> None:
    """Raise AssertionError unless moved and computed K differ by no more than the roundings of K.

    A stored number is rounded once, by a part u of it at most. Rotation mixes the errors of a pair, of length r: that
    is at most sqrt(2) u r. Then both results are rounded, by u of each. Float32 in between adds 8 of its roundings.
    """
    layer = min(layer for _, group in llm.pool.geometry.kv_groups for layer in group.layers)
    moved, there = llm.prefill(tokens).at(position), computed_at(llm, tokens, position)
    assert moved.positions == there.positions
    found, expected = moved.entries(layer).astype(np.float32), there.entries(layer).astype(np.float32)
    assert llm.config.latent or found[1].tobytes() == expected[1].tobytes()
    x, y = np.split(expected[0], 2, -1)
    pair = np.tile(np.hypot(x, y), 2)
    unit = ROUNDING[llm.pool.geometry.kv_dtype]
    bound = unit * (2**0.5 * pair + np.abs(found[0]) + np.abs(expected[0])) * (1 + 2 * unit) + 8 * 2.0**-24 * pair
    held = ~np.isnan(found[0])
    assert (np.abs(found[0] - expected[0])[held] <= bound[held]).all()
    assert held.any()


def test_moved_or_computed_there(tiny_llm: Callable[..., LLM], family: str) -> None:
    """Every family, and so every RoPE, in float32: later layers add their own rounding of what they attend to."""
    llm = tiny_llm(family)
    if 0 in llm.config.attention_layers:  # else layers with states round differently before it
        check_first_layer(llm, FIRST, 200)
    moved, there = llm.prefill(FIRST).at(200), computed_at(llm, FIRST, 200)
    grown = any(attention.growth for attention in llm.config.attentions)  # such queries know where they are
    for layer in [] if grown else sorted(layer for _, group in llm.pool.geometry.kv_groups for layer in group.layers):
        found, expected = moved.entries(layer), there.entries(layer)
        assert np.nanmax(np.abs(found - expected)) <= 1e-4 * np.nanmax(np.abs(expected)), layer


@needs_native
@pytest.mark.parametrize("kind", ["plain", "windowed"])
def test_moved_or_computed_there_in_bfloat16(kind: str) -> None:
    llm = ANY[kind, "bfloat16"].model()
    for position in (1, 16, 100, 900):
        check_first_layer(llm, SECOND, position)


def joining(parts: list[list[int]], moves_again: bool = False) -> Callable[[], Program]:
    """A program that prefills passages alone, joins them in this order, and answers a question behind them."""

    def program() -> Program:
        kv: KVCache = yield Prefill(parts[0])
        for part in parts[1:]:
            passage: KVCache = yield Prefill(part)
            kv += (passage.at(300) if moves_again else passage).at(kv.next_position)
        kv = yield Prefill(QUESTION, after=kv)
        yield Decode(kv)  # the request's result would hold pages

    return program


PROGRAMS = [joining([FIRST, SECOND]), joining([SECOND, FIRST, FIRST]), joining([FIRST, SECOND], True)] * 2
FEW = {"plain": 30, "windowed": 70, "recurrent": 90}  # pages for one or two of them
SCHEDULES = [(4096, "off", False, 1), (3, "radix", False, 1), (7, "radix", True, 2), (16, "radix", True, 1)]


def ask(llm: LLM, programs: list[Callable[[], Program]], chunk: int, steps: int = 0) -> list[Answer]:
    requests = [Request(program, PARAMS, llm.tokenizer) for program in programs]
    return answers(llm, requests, SchedulerConfig(max_step_tokens=chunk), steps)


@needs_native
@pytest.mark.thinned
@pytest.mark.parametrize(("kind", "dtype"), ANY)
def test_joined_passages_have_the_same_bits_under_every_schedule(kind: str, dtype: str) -> None:
    """Alone, batched, in chunks, with a prefix index, preempted where pages are few."""
    opened = ANY[kind, dtype].model
    alone = [ask(opened(), [program], 4096)[0] for program in PROGRAMS]
    assert alone[0] == alone[3] != alone[1]
    preempted = 0
    for chunk, index, few, threads in SCHEDULES:
        llm = opened(index, FEW[kind] if few else 1000, threads)
        before = llm.engine.preemptions
        assert ask(llm, PROGRAMS, chunk, steps=2) == alone
        preempted += llm.engine.preemptions - before
        assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)
    assert preempted


@needs_native
@pytest.mark.thinned
@pytest.mark.parametrize(("kind", "dtype"), ANY)
def test_a_joined_value_decodes_alike_wherever_it_was(kind: str, dtype: str, tmp_path: Path) -> None:
    llm = ANY[kind, dtype].model()
    one, two = llm.prefill(FIRST), llm.prefill(SECOND)
    kv = llm.prefill(QUESTION, after=one + two.at(len(one)))
    assert (kv.canonical_length(llm.model.id), kv.complete) == (len(one), True)
    expected = list(llm.decode(kv, params=PARAMS))
    kv.save(tmp_path / "kv")
    fork = llm.prefill(QUESTION, after=(one.to("host") + two.to("host").at(len(one))).to("pool"))
    for value in (KVCache.load(tmp_path / "kv", llm), kv.to("host"), kv[:40] + kv[40:], fork):
        assert (value.nbytes, value.positions) == (kv.nbytes, kv.positions)
        assert list(llm.decode(value, params=PARAMS)) == expected


@needs_native
@pytest.mark.parametrize("kind", ["plain", "windowed"])
def test_logits_behind_a_moved_value_are_computed_again(kind: str) -> None:
    """What its last entry attends to lies elsewhere now: a stroke enters that entry again."""
    llm = ANY[kind, "bfloat16"].model()
    one, two = llm.prefill(FIRST), llm.prefill(SECOND)
    both = one + two.at(len(one))
    assert both.tail is None
    found, entered = llm.decode(both, params=PARAMS), llm.prefill(SECOND[-1:], after=both.without_last())
    assert list(found) == list(llm.decode(entered, params=PARAMS))


@needs_native
def test_moved_entries_enter_no_index() -> None:
    llm = ANY["plain", "bfloat16"].model("radix", 1000)
    assert llm.model.index is not None
    llm.model.index.clear()
    moved = llm.prefill(FIRST).at(16).at(0)
    held = llm.engine.cached_pages(llm.pool)
    assert moved.canonical_length(llm.model.id) == 0
    llm.prefill(SECOND, after=moved)
    assert llm.engine.cached_pages(llm.pool) == held


def test_positions_end_where_those_of_the_model_end(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("llama")
    kv = llm.prefill(FIRST)
    last = llm.config.max_position - len(kv)
    assert kv.at(last).positions[-1] == llm.config.max_position - 1
    with pytest.raises(KVError, match=f"positions end at {llm.config.max_position - 1}"):
        kv.at(last + 1)
