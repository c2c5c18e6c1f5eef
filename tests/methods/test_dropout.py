"""Strokes with dropout: bits depend only on the seed, and no state is left; the gate that uses them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.methods.watching import PROMPT, needs_native, runs_of
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.methods import OverFill, Refresh
from twostroke.methods.refresh import variance
from twostroke.models.dropout import Dropout
from twostroke.sampling.params import SamplingParams

pytestmark = needs_native
Native = Callable[..., LLM]
LONG = PROMPT * 5


def prefilled(llm: LLM, *drops: Dropout | None, after: KVCache | None = None) -> list[KVCache]:
    """The same tokens prefilled with each of these dropouts at once, beside an ordinary request."""

    def program() -> Program:
        return (yield [Prefill(LONG, after, dropout=drop) for drop in drops])

    def beside() -> Program:
        return (yield Prefill(PROMPT * 3))

    requests = [Request(made, SamplingParams(), llm.tokenizer) for made in (program, beside)]
    llm.engine.finish([llm.engine.submit(request) for request in requests])
    return requests[0].result


def same(a: KVCache, b: KVCache) -> bool:
    assert a.tail is not None
    assert b.tail is not None
    assert a.tail.logits is not None
    assert b.tail.logits is not None
    return bool((a.entries() == b.entries()).all() and (a.tail.logits == b.tail.logits).all())


def test_nothing_dropped_changes_no_bit(native_llm: Native) -> None:
    llm = native_llm()
    plain, nothing, beside = prefilled(llm, None, Dropout(0.0, 5), Dropout(0.2, 5))
    assert same(plain, llm.prefill(LONG)), "not even in the same pass"
    assert same(nothing, plain)
    assert not same(beside, plain)


def test_bits_depend_on_the_seed_alone(native_llm: Native) -> None:
    drops = [Dropout(0.2, seed) for seed in range(3)]
    expected = prefilled(native_llm(), *drops)
    assert not same(expected[0], expected[1])
    assert not same(expected[1], expected[2])
    for options in ({"max_step_tokens": 7}, {"threads": 3}, {"prefix_index": "radix"}):
        llm = native_llm(**options)
        for _ in range(2):
            assert all(map(same, prefilled(llm, *reversed(drops)), reversed(expected))), options
    assert same(prefilled(native_llm(), drops[1])[0], expected[1]), "alone"


def test_no_index_gives_or_takes_them(native_llm: Native) -> None:
    llm = native_llm(prefix_index="radix")
    dropped, again = prefilled(llm, Dropout(0.2), Dropout(0.2, 1))
    assert same(llm.prefill(LONG), native_llm().prefill(LONG))
    assert dropped.canonical_length(llm.model.id) == again.canonical_length(llm.model.id) == 0
    after = llm.prefill(PROMPT)
    assert prefilled(llm, Dropout(0.2), after=after)[0].canonical_length(llm.model.id) == len(PROMPT)


def test_the_value_goes_on_as_if_nothing_had_been_dropped(native_llm: Native) -> None:
    """Each pass enters the pending token separately; without one, the last entry is computed again."""
    llm = native_llm(student="int2")
    looked = runs_of(llm, Refresh(when="mc-dropout", every=3, threshold=1e9), PROMPT)
    plain = runs_of(llm, OverFill(), PROMPT)
    assert looked[0] == plain[0]
    assert (looked[1][-1].kv.entries() == plain[1][-1].kv.entries()).all()
    assert looked[2].at == ()
    assert len(looked[2].looks) == 13

    def passes() -> Program:
        kv = yield Prefill(PROMPT)
        return (yield [Prefill([], kv, dropout=Dropout(p)) for p in (0.0, 0.2)])

    request = Request(passes, SamplingParams(), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    nothing, some = request.result
    assert nothing.tokens == some.tokens == PROMPT
    assert same(nothing, llm.prefill(PROMPT))
    assert not same(some, nothing)


def test_the_gate(native_llm: Native) -> None:
    """It refreshes exactly where passes of the student disagree by more than the threshold."""
    llm = native_llm(student="int2")
    looks, threshold = [], 1.35
    policy = Refresh(when="mc-dropout", every=4, threshold=threshold, passes=5, dropout=0.2)
    _, runs, facts = runs_of(llm, policy, PROMPT, max_tokens=60)
    at = 0
    for run in runs[:-1]:
        at += len(run.tokens)

        def program(kv: KVCache = run.kv) -> Program:
            drops = [Dropout(0.2, seed) for seed in range(5)]
            return (yield [Prefill([], kv, model="student", dropout=drop) for drop in drops])

        request = Request(program, SamplingParams(), llm.tokenizer)
        llm.engine.finish([llm.engine.submit(request)])
        rows = np.stack([value.tail.logits for value in request.result]).astype(np.float64)  # pyright: ignore[reportOptionalMemberAccess]
        looks.append(float(((rows - rows.mean(0)) ** 2).sum(0).mean() / 4))
        assert variance(request.result) == pytest.approx(looks[-1])
        assert (at in facts.at) == (looks[-1] > threshold)
        del request, rows
    assert facts.looks == pytest.approx(looks)
    assert 0 < len(facts.at) < len(looks), looks


def test_backends_agree(native_llm: Native, native_directory: Path) -> None:
    """Masks are the same, so logits are as close with dropout as without; those of another seed are not."""
    mine, reference = native_llm(), LLM(str(native_directory), backend="reference", weights="int8", kv_bytes=16 << 20)
    drops = (None, Dropout(0.2), Dropout(0.2, 1))
    logits: Any = [[kv.tail.logits for kv in prefilled(llm, *drops)] for llm in (mine, reference)]  # pyright: ignore[reportOptionalMemberAccess]
    (plain, first, other), (plain_reference, first_reference, _) = logits
    norm = np.linalg.norm
    error = norm(plain - plain_reference) / norm(plain_reference)
    assert norm(first - first_reference) / norm(first_reference) < 2 * error + 1e-3
    assert norm(first - other) / norm(other) > 10 * error
