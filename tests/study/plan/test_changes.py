"""Techniques as counts of strokes, levers, advice, and when to disaggregate."""

from typing import Any

import pytest

from twostroke.models.cost import SequenceRows
from twostroke.study.plan.account import account
from twostroke.study.plan.advice import advise, binds, problems, without_more_devices
from twostroke.study.plan.changes import FAMILIES_BY_PROBLEM, ChangeLimits, changes_alone
from twostroke.study.plan.disaggregation import assess_disaggregation
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import specifications
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.plan.roofline import Roofline
from twostroke.study.plan.techniques import Companion, techniques
from twostroke.study.plan.weights import FORMATS

LLAMA, SMALL = specifications()["llama-3.1-70b"], specifications()["llama-3.1-8b"]
KNOWN = techniques(LLAMA, Companion(SMALL, FORMATS["bf16"]))
LIMITS = ChangeLimits(8, tuple(FORMATS), KNOWN)


def plan(tp: int = 1, weights: str = "bf16", technique: str = "plain", machine: str = "h100", **load: Any) -> Plan:
    workload = RequestProfile(**({"prompt": 4096, "output": 256} | load))
    return make_plan(LLAMA, find_machine(machine), FORMATS[weights], tp, workload, KNOWN[technique])


@pytest.mark.parametrize(
    ("technique", "entered", "kept"),
    [("repeat", 8192, 8192), ("ptdo", 8192, 4096), ("drop", 4096, 1024), ("compress", 2048, 2048)],
)
def test_entries(technique: str, entered: int, kept: int) -> None:
    """What is prefilled and what is held, for which memory and times are counted."""
    made = plan(4, technique=technique)
    assert (made.technique.entered(4096), made.technique.kept(4096)) == (entered, kept)
    held = min(kept + 256, 1024) if technique == "drop" else kept + 256
    companion = 0 if made.technique.companion is None else FORMATS["bf16"].total(SMALL)
    assert made.memory.kv_per_user == LLAMA.kv_bytes(held)
    assert made.memory.weights == FORMATS["bf16"].total(LLAMA) + companion
    if companion == 0:
        assert made.prefill == made.roofline.step([SequenceRows(entered, 0, 1)])
        # a mean decoded token has half of the answer before it
        assert made.decode(3) == made.roofline.step([SequenceRows(1, min(kept + 128, held), 1)] * 3)


def test_ptdo_holds_the_first_copy_while_it_prefills() -> None:
    memory = plan(4, technique="ptdo").memory
    assert memory.passing == LLAMA.kv_bytes(8192 - 4352)
    assert memory.users == (memory.room - memory.passing) // memory.kv_per_user


def test_speculation_by_hand() -> None:
    """A round of k guesses, of which each stands with probability a, makes (1 - a^(k + 1)) / (1 - a) tokens."""
    made = plan(4, technique="speculative-draft")
    drafts = Roofline(SMALL, made.machine, FORMATS["bf16"], 4).step([SequenceRows(1, 4096 + 128, 1)])
    judged = made.roofline.step([SequenceRows(5, 4096 + 128, 5)])
    expected = (judged.seconds + 4 * drafts.seconds) / ((1 - 0.5**5) / (1 - 0.5))
    assert made.decode(1).seconds == pytest.approx(expected)
    assert made.memory.kv_per_user == LLAMA.kv_bytes(4352) + SMALL.kv_bytes(4352)
    assert made.prefill == plan(4).prefill


def test_refresh_by_hand() -> None:
    made = plan(4, technique="refresh")
    student = Roofline(LLAMA, made.machine, FORMATS["int4"], 4).step([SequenceRows(1, 4096 + 128, 1)])
    again = made.roofline.step([SequenceRows(64, 4096 + 128 - 64)])
    assert made.decode(1).seconds == pytest.approx(student.seconds + again.seconds / 64)
    assert plan(4, technique="overfill").decode(1).seconds == student.seconds
    assert made.memory.weights == FORMATS["bf16"].total(LLAMA) + FORMATS["int4"].total(LLAMA)


def test_the_link_by_hand() -> None:
    """Two all-reduces a layer, of 2 (n - 1) / n rows of bf16, and a latency each."""
    machine = find_machine("h100")
    gathered = 80 * 3 / 4 * 4096 * (8192 + 2 * 8192 + 28672) * 2
    assert Roofline(LLAMA, machine, FORMATS["bf16"], 4).gather_bytes(4096) == gathered
    each = 2 * 3 / 4 * 4096 * 8192 * 2 / (450e9 * 0.8) + 5e-6
    assert Roofline(LLAMA, machine, FORMATS["bf16"], 4).step([SequenceRows(4096)]).link_s == pytest.approx(160 * each)


def test_advice_in_order() -> None:
    """First what does not fit, then TTFT; of each family the mildest change that is enough."""
    made = plan(ttft_ms=500, itl_ms=50)
    assert problems(made) == ["memory", "TTFT", "ITL"]
    assert [binds(made, one) for one in problems(made)] == ["memory", "compute", "bandwidth"]
    advised = advise(made, LIMITS)
    assert [(step.problem, step.change.name) for step in advised.steps] == [
        ("memory", "tensor parallelism of 2"),
        ("TTFT", "tensor parallelism of 4"),
    ]
    assert [one.name for one in advised.changes] == ["tensor parallelism of 4"]
    assert advised.after == plan(4, ttft_ms=500, itl_ms=50)


def test_levers_add_up() -> None:
    """The advised plan has all changes at once."""
    advised = without_more_devices(plan(ttft_ms=500, itl_ms=50), LIMITS)
    assert [one.name for one in advised.changes] == ["weights in int4", "prefix caching of half of the prompt"]
    assert advised.after == plan(weights="int4", shared=2048, ttft_ms=500, itl_ms=50)
    assert advised.after.verdict == "nothing to do"


def test_no_step_makes_a_new_problem() -> None:
    loads: list[dict[str, Any]] = [{"ttft_ms": 200, "itl_ms": 8}, {"ttft_ms": 60}, {"itl_ms": 3, "concurrency": 64}]
    for load in loads:
        for advised in (advise(plan(**load), LIMITS), without_more_devices(plan(**load), LIMITS)):
            wrong = problems(plan(**load))
            for step in advised.steps:
                assert problems(step.before) == wrong
                # what is kept alone only can be told to be missed together
                assert set(problems(step.change.after)) - {"both together"} <= set(wrong)
                wrong = problems(step.change.after)


def test_nothing_is_advised_where_nothing_is_wrong_or_nothing_helps() -> None:
    assert advise(plan(4, ttft_ms=500), LIMITS).steps == ()
    little = without_more_devices(plan(machine="l4", ttft_ms=1), LIMITS)
    assert little.after.verdict == "does not fit"
    assert {step.problem for step in little.steps} == {"memory"}  # what does not fit has no times to improve


def test_every_family_is_a_what_if_somewhere() -> None:
    """Each lever that advice can use is also listed alone: repeated plans have PTDO, others everything else."""
    plain = changes_alone(plan(concurrency=4), LIMITS)
    repeated = changes_alone(plan(technique="repeat"), LIMITS)
    for family in {one for families in FAMILIES_BY_PROBLEM.values() for one in families}:
        alone = [*family(plan(concurrency=4), LIMITS), *family(plan(technique="repeat"), LIMITS)]
        assert alone
        assert {one.name for one in alone} <= {one.name for one in (*plain, *repeated)}


def test_half_of_the_kv_is_the_first_advice_for_repetition() -> None:
    users = plan(4, technique="repeat").memory.users
    made = plan(4, technique="repeat", concurrency=users + 1)
    assert made.verdict == "does not fit"
    assert advise(made, LIMITS).changes[0].after.technique == KNOWN["ptdo"]


def test_when_to_disaggregate() -> None:
    alone, many = plan(4, ttft_ms=500, itl_ms=50), plan(4, ttft_ms=500, itl_ms=50, concurrency=32)
    assert assess_disaggregation(alone).why == "nobody decodes beside a prefill"
    assert not assess_disaggregation(many).pays
    assert "chunks of" in assess_disaggregation(many).why
    both = plan(4, ttft_ms=310, itl_ms=25, concurrency=32)
    assert both.missed() == ["both together"]
    assert both.ttft_ms < 310 < both.ttft_beside_ms
    advised = advise(both, ChangeLimits(4, tuple(FORMATS), KNOWN))
    assert [one.name for one in advised.changes] == ["prefill and decode on workers of their own"]
    assert advised.after.ttft_ms == pytest.approx(1e3 * (both.prefill.seconds + LLAMA.kv_bytes(4096) / (450e9 * 0.8)))
    tight = assess_disaggregation(both)
    assert tight.pays
    assert tight.transfer_s == pytest.approx(LLAMA.kv_bytes(4096) / (450e9 * 0.8))
    assert tight.prefill_per_decode == pytest.approx(
        plan(4).prefill.seconds / (256 * plan(4, concurrency=32).decode().seconds / 32)
    )


def test_the_account_has_the_plan_s_figures() -> None:
    made = plan(4, ttft_ms=200, itl_ms=50, concurrency=8)
    facts = account(made, LIMITS)
    assert facts["verdict"] == "misses the objective"
    assert facts["missed"] == ["TTFT"]
    assert facts["binds"] == {"TTFT": "compute"}
    assert (facts["prefill"]["ms"], facts["decode"]["ms"]) == (made.ttft_ms, made.itl_ms)
    assert [row["devices"] for row in facts["tensor_parallelism"]] == [1, 2, 4, 8, 16]
    assert facts["advice"]["changes"] == ["tensor parallelism of 8"]


def test_utilization_by_hand() -> None:
    """FLOPs and bytes of a step over what the devices could do in its time."""
    made = plan(4, concurrency=8)
    step, facts = made.decode(), account(made, LIMITS)["decode"]
    assert facts["compute_percent"] == pytest.approx(100 * step.flops / (989e12 * step.seconds))
    assert facts["bandwidth_percent"] == pytest.approx(100 * step.bytes / (3.35e12 * step.seconds))
