"""OverFill and KV refresh: bitwise identities, and each policy against its definition."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.methods.watching import PROMPT, needs_native, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.methods import Method, OverFill, Plain, Refresh, method
from twostroke.methods.refresh import divergence, percentile

pytestmark = needs_native
Native = Callable[..., LLM]
SAMPLED = {"temperature": 0.9, "seed": 5}
POLICIES = [
    OverFill(),
    OverFill(recompute=True),
    Refresh(every=1),
    Refresh(every=7),
    Refresh(every=8, window=8),
    Refresh(every=8, window=3),
    Refresh(when="entropy", threshold=0.0, every=1),
    Refresh(when="entropy", threshold=7.1, every=2),
    Refresh(when="budget", budget=300, every=1),
    Refresh(when="probe", every=4, threshold=0.0),
    Refresh(when="mc-dropout", every=4, threshold=0.0),
]


@pytest.mark.parametrize("index", ["off", "radix"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_teacher_for_a_student_changes_nothing(
    policy: Method, sampling: dict[str, float], index: str, native_llm: Native
) -> None:
    """Tokens and every bit of the KV equal those of the plain request."""
    llm = native_llm(student="int8", prefix_index=index)
    plain, (expected,), _ = runs_of(llm, Plain(), PROMPT, **sampling)
    made, runs, _ = runs_of(llm, policy, PROMPT, **sampling)
    assert made == plain
    assert runs[-1].kv.tokens == expected.kv.tokens
    assert (runs[-1].kv.entries() == expected.kv.entries()).all()


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_refreshed_at_every_token_the_kv_is_the_teachers(sampling: dict[str, float], native_llm: Native) -> None:
    llm = native_llm(student="int2")
    made, runs, facts = runs_of(llm, Refresh(every=1), PROMPT, **sampling)
    final = runs[-1].kv
    teachers = llm.prefill([*PROMPT, *made[:-1]])
    assert final.tokens == teachers.tokens
    assert final.positions == teachers.positions
    # The last entry is the student's: it would be refreshed next.
    assert (final[:-1].entries() == teachers[:-1].entries()).all()
    assert not (final[-1:].entries() == teachers[-1:].entries()).all()
    assert facts.at == tuple(range(1, 40))
    assert facts.teacher_tokens == 38
    assert made != runs_of(llm, OverFill(), PROMPT, **sampling)[0]


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
def test_what_a_periodic_refresh_replaces(window: int | None, native_llm: Native) -> None:
    """After 8, 16, ... tokens the last `window` entries are those of the teacher; the others are unchanged."""
    llm = native_llm(student="int2")
    _, runs, facts = runs_of(llm, Refresh(every=8, window=window), PROMPT, max_tokens=30)
    assert facts.at == (8, 16, 24)
    assert [len(run.tokens) for run in runs] == [8, 8, 8, 6]
    for before, after in itertools.pairwise(runs):
        count, since = len(before.kv), len(before.kv) - 8 if before is not runs[0] else len(PROMPT)
        since = max(since, count - (window or count))
        teachers = llm.prefill(before.kv.tokens).entries()
        kept = after.kv[:count].entries()
        assert (kept[:, :, since:] == teachers[:, :, since:]).all()
        assert (kept[:, :, :since] == before.kv.entries()[:, :, :since]).all()
        assert not (before.kv.entries()[:, :, since:] == teachers[:, :, since:]).all()
        # The last sampled token was pending: it is entered once, after the spliced entries.
        assert after.kv.tokens[count] == before.tokens[-1]


def test_overfill_is_the_student_over_the_teachers_prompt(native_llm: Native) -> None:
    """No token of the prompt is entered twice."""
    llm = native_llm(student="int2")
    teacher = llm.prefill(PROMPT)
    made, (run,), _ = runs_of(llm, OverFill(), PROMPT)
    assert run.kv.tokens == [*PROMPT, *made[:-1]]
    assert (run.kv[: len(PROMPT)].entries() == teacher.entries()).all()
    first = int(teacher.tail.logits.argmax())  # pyright: ignore[reportOptionalMemberAccess]
    assert made[0] == first
    rest = llm.prefill(made[:-1], after=teacher, model="student")
    assert (run.kv.entries() == rest.entries()).all()
    _, (own,), _ = runs_of(llm, OverFill(recompute=True), PROMPT)
    assert (own.kv[: len(PROMPT) - 1].entries() == teacher[:-1].entries()).all()
    last = llm.prefill(PROMPT[-1:], after=teacher[:-1], model="student")
    assert (own.kv[: len(PROMPT)].entries() == last.entries()).all()


def test_the_entropy_gate(native_llm: Native) -> None:
    """It opens at the first token above the threshold, at least `every` tokens after the last opening."""
    llm = native_llm(student="int2")
    _, runs, facts = runs_of(llm, Refresh(when="entropy", threshold=7.1, every=3), PROMPT, **SAMPLED)
    entropies = [sampled.entropy for run in runs for sampled in run.sampled]
    expected, last = [], 0
    for count, entropy in enumerate(entropies[:-1], 1):
        assert entropy is not None
        if count - last >= 3 and entropy > 7.1:
            expected.append(count)
            last = count
    assert facts.at == tuple(expected)
    assert 0 < len(expected) < 13


def test_the_budget(native_llm: Native) -> None:
    """The gate is a percentile of the answer so far; the budget is used but never exceeded."""
    policy = Refresh(when="budget", budget=100, every=1)
    for seed in range(4):
        llm = native_llm(student="int2")
        _, runs, facts = runs_of(llm, policy, PROMPT, temperature=1.0, seed=seed, max_tokens=120)
        entropies = [sampled.entropy or 0.0 for run in runs for sampled in run.sampled]
        assert facts.at
        for number, count in enumerate(facts.at):
            assert entropies[count - 1] > percentile(entropies[: count - 1], 100)
            assert number < 100 * count / 1000 + 1


def test_percentiles() -> None:
    entropies = np.random.default_rng(0).gamma(2.0, 1.5, 4000).tolist()
    for budget in (2.5, 30, 50):
        threshold = percentile(entropies, budget)
        above = sum(entropy > threshold for entropy in entropies)
        assert above == pytest.approx(4 * budget, abs=1)


def test_the_probe(native_llm: Native) -> None:
    """It refreshes exactly where the divergence of the next token is above the threshold."""
    llm, divergences = native_llm(student="int2"), []
    _, runs, facts = runs_of(llm, Refresh(when="probe", every=4, threshold=1.0), PROMPT, max_tokens=60, **SAMPLED)
    refreshed = list(facts.at)
    at = 0
    for run in runs[:-1]:
        at += len(run.tokens)
        text = [*run.kv.tokens, run.tokens[-1]]
        student = llm.prefill([], after=run.kv, model="student")
        divergences.append(divergence(llm.prefill(text), student))
        assert (at in refreshed) == (divergences[-1] > 1.0)
    assert 0 < len(refreshed) < len(runs) - 1
    assert runs_of(llm, Refresh(when="probe", every=4, threshold=1e9), PROMPT)[0] == runs_of(llm, OverFill(), PROMPT)[0]


def test_divergence(native_llm: Native) -> None:
    llm = native_llm(student="int2")
    teacher, student = llm.prefill(PROMPT), llm.prefill(PROMPT, model="student")
    logits = (torch.from_numpy(value.tail.logits) for value in (teacher, student))  # pyright: ignore[reportOptionalMemberAccess]
    p, q = (row.double().softmax(-1) for row in logits)
    assert divergence(teacher, student) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-9)
    assert divergence(teacher, teacher) == 0


def test_a_students_entries_never_pass_for_the_teachers(native_llm: Native) -> None:
    """Warm and cold runs agree: the student's entries are in no prefix index."""
    warm = native_llm(student="int2", prefix_index="radix")
    expected = runs_of(native_llm(student="int2"), Refresh(every=5), PROMPT * 3)[0]
    made: list[int] = []
    for _ in range(3):
        made, _, _ = runs_of(warm, Refresh(every=5), PROMPT * 3)
        assert made == expected
    text = [*PROMPT * 3, *made]
    assert (warm.prefill(text).entries() == native_llm().prefill(text).entries()).all()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"when": "always"}, "when must be one of periodic, entropy, budget, probe, mc-dropout"),
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"window": 0}, "window must be an integer"),
        ({"threshold": -1}, "threshold must be a number of at least 0"),
        ({"threshold": "high"}, "threshold must be a number"),
        ({"dropout": 1}, "dropout must be a number from 0 to 0.9"),
        ({"passes": 1}, "passes must be an integer from 2 to 64"),
        ({"budget": 1001}, "budget must be a number from 0 to 1000"),
    ],
)
def test_bad_parameters(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method("refresh", **parameters)


def test_without_a_student(native_llm: Native) -> None:
    with pytest.raises(InvalidRequest, match="method overfill needs a student: open the model with one"):
        native_llm().generate([PROMPT], method=OverFill())
