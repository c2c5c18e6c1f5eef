"""A method that is forced through a given text has the same state before every token as when it decodes that text."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.methods import BestOf, Drop, Method, Plain, Prompt, Repeat, Snap
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.contenders import Contender, contender
from twostroke.study.evaluate.forced_text import ForcedLogits, force_text, with_stroke_times
from twostroke.study.evaluate.measure import Case, Comparison
from twostroke.study.evaluate.measures import Divergence
from twostroke.study.evaluate.measures.answers import StrokeRecord
from twostroke.study.evaluate.task import Item
from twostroke.study.evaluate.tasks import LongForm

TinyLLM = Callable[..., LLM]
PROMPT = [5, 9, 17, 33, 65, 129, 200, 11, 4, 7, 250, 3, 90, 21, 8, 77, 41, 30, 12]
SETTINGS = [
    Plain(),
    Repeat(),
    Repeat(sinks=4),
    Repeat(keep="all"),
    Repeat(times=3),
    Snap(window=4, budget=9),
    Drop(window=5, every=3, by="attention"),
]


def result(llm: LLM, make: Callable[[], Program], max_tokens: int | None = None) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    request = llm.engine.submit(Request(make, params, llm.tokenizer))
    llm.engine.finish([request])
    return request


def lead(llm: LLM, make: Callable[[], Program], tokens: list[int]) -> ForcedLogits:
    return result(llm, lambda: force_text(make(), tokens)).result


@pytest.mark.parametrize("method", SETTINGS)
def test_what_it_would_have_decoded(method: Method, tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    made = llm.generate([PROMPT], method=method, max_tokens=12, ignore_eos=True, logprobs=0)[0].tokens
    ids = [token.id for token in made]
    found = lead(llm, lambda: method.program(Prompt(PROMPT, llm.tokenizer)), ids)
    assert found.logits.argmax(-1).tolist() == ids
    assert found.logprobs(ids) == pytest.approx([token.logprob for token in made], abs=1e-4)


@pytest.mark.parametrize("text", [[7], [7, 8], [200, 3, 3, 41, 5, 6]])
@pytest.mark.parametrize("cut", ["tail", "pending", "none"])
def test_wherever_a_decode_starts(cut: str, text: list[int], tiny_llm: TinyLLM) -> None:
    """From existing logits, from a pending token, or from a slice whose last entry is computed again."""
    llm = tiny_llm()

    def program() -> Program:
        kv = yield Prefill(PROMPT if cut == "tail" else [*PROMPT, 99])
        if cut == "none":
            kv = kv[:-1]
        elif cut == "pending":
            kv = (yield Decode(kv[:-1], max_tokens=1)).kv
        yield Decode(kv)

    before = [42] if cut == "pending" else []  # answers the first of the program's two decodes
    whole = [*PROMPT, *before, *text]

    def scored() -> Program:
        return (yield Prefill(whole, logits="all"))

    expected = result(llm, scored).result.logits[-len(text) - 1 : -1]
    found = lead(llm, program, [*before, *text])
    assert found.logits.dtype == expected.dtype
    np.testing.assert_allclose(found.logits[len(before) :], expected, atol=1e-4, rtol=0, equal_nan=False)
    assert found.entries == len(PROMPT)


def test_conditions_are_asked_as_in_a_decode(tiny_llm: TinyLLM) -> None:
    """A refresh during an answer: after every 3 tokens the value is recomputed from the second prompt token on."""
    llm, heard = tiny_llm(), []

    def program() -> Program:
        kv = yield Prefill(PROMPT)
        while True:
            run = yield Decode(kv, until=lambda sampled: len(sampled) == 3, stats=True)
            heard.append([(s.id, s.entropy is not None) for s in run.sampled])
            if run.finish_reason is not None:
                return
            kv = yield Prefill([*run.kv.tokens[1:], run.kv.pending])

    made = result(llm, program, max_tokens=8)
    tokens = list(made.events)
    ids = [token.id for token in tokens]
    decoded, heard[:] = list(heard), []
    found = lead(llm, program, ids)
    assert found.logits.argmax(-1).tolist() == ids
    assert found.logprobs(ids) == pytest.approx([token.logprob for token in tokens], abs=1e-4)
    assert heard == decoded[:2]  # the third is not needed to its end
    plain = llm.generate([PROMPT], max_tokens=8, ignore_eos=True, logprobs=0)[0].tokens
    assert [token.logprob for token in plain] != pytest.approx([token.logprob for token in tokens], abs=1e-4)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            lambda: BestOf(candidates=2).program(PROMPT),  # pyright: ignore[reportArgumentType]
            "the method decodes drafts or candidates",
        ),
        (lambda: short(), "the method ends after 2 of 3 tokens"),
    ],
)
def test_what_cannot_be_led(program: Callable[[], Program], message: str, tiny_llm: TinyLLM) -> None:
    with pytest.raises(InvalidRequest, match=message):
        lead(tiny_llm(), program, [3, 4, 5])


def short() -> Program:
    kv = yield Prefill(PROMPT)
    yield Decode(kv, max_tokens=2)


def test_watching_changes_nothing(tiny_llm: TinyLLM) -> None:
    llm, seen = tiny_llm(), []
    method = Repeat(sinks=2)
    request = result(
        llm,
        lambda: with_stroke_times(
            method.program(Prompt(PROMPT, llm.tokenizer)), lambda stroke, _: seen.append(type(stroke))
        ),
        5,
    )
    plain = llm.generate([PROMPT], method=method, max_tokens=5, ignore_eos=True)[0]
    assert [token.id for token in request.events] == [token.id for token in plain.tokens]
    assert seen == [Prefill, Decode]


def test_a_watch_counts_refreshes_and_starts_over(tiny_llm: TinyLLM) -> None:
    llm, watch = tiny_llm(), StrokeRecord()
    for _ in range(2):
        result(llm, lambda: watch.record(refreshing()), max_tokens=8)
        assert watch.kept_bytes == len(PROMPT) * llm.pool.entry_bytes
        assert watch.late_prefills == 2
        assert watch.late_s > 0


def refreshing() -> Program:
    """After every 3 tokens the value is recomputed."""
    kv = yield Prefill(PROMPT)
    while (run := (yield Decode(kv, max_tokens=3))).finish_reason is None:
        kv = yield Prefill([*run.kv.tokens, run.kv.pending])


@functools.cache
def real() -> LLM:
    return LLM("smollm2-135m", backend="native", kv_bytes=64 << 20)


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_no_divergence_from_oneself() -> None:
    """Exactly 0 on the bitwise reproducible backend: for the baseline, an equivalent of it, and one that keeps all."""
    names = [contender("plain"), contender("repeat", times=1), contender("ptdo", times=1), contender("ptdo")]
    same: Any = divergence(real(), names, names[0])
    assert all(len(record["kl"]) > 8 for record in same.values())
    for name in names[:3]:
        assert set(same[name.name]["kl"]) == {0.0}
        assert same[name.name]["exact"] is True
    assert min(same["ptdo"]["kl"]) > 0

    full: Any = divergence(
        real(), [contender("repeat"), contender("ptdo"), contender("ptdo", sinks=1000)], contender("repeat")
    )
    assert full["ptdo"]["kl"][0] == 0.0  # the first token is the whole cache's, by construction
    assert min(full["ptdo"]["kl"][1:]) > 0
    assert set(full["ptdo:sinks=1000"]["kl"]) == {0.0}
    assert full["ptdo"]["kept_bytes"] * 2 == full["repeat"]["kept_bytes"]


def divergence(llm: LLM, names: list[Contender], baseline: Contender) -> dict[str, dict[str, object]]:
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    comparison = Comparison(
        llm, LongForm(), tuple(names), baseline, lambda _: SamplingParams(), positions=12, timings=False
    )
    return Divergence().measure(comparison, [Case(Item("a", ""), Prompt(prompt, llm.tokenizer), [])], [{}])[0]


def test_a_student_decodes_after_its_teacher(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    """The first token is the teacher's, the others the student's over the teacher's entries, refreshed once."""
    llm, student = tiny_llm(), LLM(str(write_model("llama", tmp_path, seed=1)), kv_bytes=1 << 24, threads=1)
    llm.engine.models["student"] = replace(student.model, name="student", pool=llm.pool, index=None)

    def program() -> Program:
        teacher = kv = yield Prefill(PROMPT)
        while (run := (yield Decode(kv, model="student", max_tokens=4))).finish_reason is None:
            teacher = kv = yield Prefill(run.tokens, after=teacher)

    tokens = list(result(llm, program, max_tokens=8).events)
    ids = [token.id for token in tokens]
    assert lead(llm, program, ids).logprobs(ids) == pytest.approx([token.logprob for token in tokens], abs=1e-4)
    alone = lead(llm, lambda: Plain().program(Prompt(PROMPT, llm.tokenizer)), ids).logprobs(ids)
    assert alone[::4] == pytest.approx([token.logprob for token in tokens][::4], abs=1e-4)
    assert alone[1:4] != pytest.approx([token.logprob for token in tokens][1:4], abs=1e-4)
