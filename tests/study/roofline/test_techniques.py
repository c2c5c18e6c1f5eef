"""Techniques as counts of strokes, the link, formats of weights, and machines."""

from typing import Any

import pytest

from twostroke.models.cost import SequenceRows
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.roofline.machines import SPREAD, find_machine, machines
from twostroke.study.roofline.named_models import companion_of, specifications
from twostroke.study.roofline.roofline import Roofline
from twostroke.study.roofline.techniques import Companion, techniques
from twostroke.study.roofline.weight_formats import FORMATS, SHORT_NAMES, weight_format
from twostroke.study.simulate.step_costs import RooflineCosts

LLAMA, SMALL = specifications()["llama-3.1-70b"], specifications()["llama-3.1-8b"]
KNOWN = techniques(LLAMA, Companion(SMALL, FORMATS["bf16"]))


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


def test_the_model_s_own_head_guesses() -> None:
    """It has KV of its own and weights in the model's format; four steps of it, of which each reads the whole head."""
    model, machine = specifications()["qwen3.5-27b"], find_machine("h100")
    known = techniques(model, companion_of("mtp", model))
    assert "speculative-draft" not in known
    load = RequestProfile(4096, 256)
    for name in ("bf16", "fp8-w8a8"):
        form = FORMATS[name]
        made = make_plan(model, machine, form, 1, load, known["speculative-mtp"])
        plain = make_plan(model, machine, form, 1, load)
        assert made.memory.weights == form.total(model) + form.total(model.guessing)
        assert made.memory.kv_per_user == plain.memory.kv_per_user + model.guessing.kv_bytes(4352)
        one, context = Roofline(model.guessing, machine, form).step([SequenceRows(1, made.context, 1)]), made.context
        assert one.bytes > form.head * model.vocab * model.hidden
        judged = made.roofline.step([SequenceRows(5, context, 5)])
        assert made.decode(1).seconds == pytest.approx((judged + one * 4).seconds / ((1 - 0.7**5) / (1 - 0.7)))


def test_refresh_by_hand() -> None:
    made = plan(4, technique="refresh")
    student = Roofline(LLAMA, made.machine, FORMATS["int4-w4a8"], 4).step([SequenceRows(1, 4096 + 128, 1)])
    again = made.roofline.step([SequenceRows(64, 4096 + 128 - 64)])
    assert made.decode(1).seconds == pytest.approx(student.seconds + again.seconds / 64)
    assert plan(4, technique="overfill").decode(1).seconds == student.seconds
    assert made.memory.weights == FORMATS["bf16"].total(LLAMA) + FORMATS["int4-w4a8"].total(LLAMA)


def test_the_link_by_hand() -> None:
    """Two all-reduces a layer, of 2 (n - 1) / n rows of bf16, and a latency each."""
    machine = find_machine("h100")
    gathered = 80 * 3 / 4 * 4096 * (8192 + 2 * 8192 + 28672) * 2
    assert Roofline(LLAMA, machine, FORMATS["bf16"], 4).gather_bytes(4096) == gathered
    each = 2 * 3 / 4 * 4096 * 8192 * 2 / (450e9 * 0.8) + 5e-6
    assert Roofline(LLAMA, machine, FORMATS["bf16"], 4).step([SequenceRows(4096)]).link_s == pytest.approx(160 * each)


def test_utilization_by_hand() -> None:
    """FLOPs and bytes of a step over what the devices could do in its time."""
    made = plan(4, concurrency=8)
    step = made.decode()
    compute, bandwidth = step.utilization(made.machine)
    assert compute == pytest.approx(step.flops / (989e12 * step.seconds))
    assert bandwidth == pytest.approx(step.bytes / (3.35e12 * step.seconds))


def test_a_small_all_reduce_costs_its_latency() -> None:
    """A decode step of one row: 160 all-reduces of 16 KB, which take as good as their latency alone."""
    for name, latency in (("h100", 5e-6), ("rtx-4090", 42e-6)):
        step = Roofline(LLAMA, find_machine(name), FORMATS["bf16"], 8).step([SequenceRows(1, 100, 1)])
        assert step.link_s == pytest.approx(160 * latency, rel=0.1)


def test_names_of_formats_say_what_is_multiplied() -> None:
    """WxAy: the bytes of a weight, and those of the dtype that is multiplied; short names mean the same formats."""
    bits = {"bf16": 16, "fp8": 8, "int8": 8, "fp4": 4}
    for name, form in FORMATS.items():
        if name != "bf16":
            stored, multiplied = (int(part) for part in name.rpartition("-w")[2].split("a"))
            assert stored <= 8 * form.expert < stored + 1.5
            assert bits[form.arithmetic[0]] == multiplied
    assert {weight_format(short) for short in SHORT_NAMES} <= set(FORMATS.values())
    assert FORMATS["int4-w4a8"].title(find_machine("h100")) == "int4 weights, int8 products"
    assert FORMATS["fp8-w8a8"].title(find_machine("a100")) == "fp8 weights, bf16 products"


@pytest.mark.parametrize(("machine", "share"), [("h100", 132 / 256), ("epyc-9654", 1.0)])
def test_kv_of_8_bits_has_scales_and_no_cpu_reads_it_sooner(machine: str, share: float) -> None:
    """132 bytes in place of 256 for a head of 128 numbers. On CPUs a step of 8 bits was measured to take as long."""
    less = LLAMA.with_kv_bits(8)
    assert less.kv_bytes(1000) == 132 * LLAMA.kv_bytes(1000) // 256
    rows = [SequenceRows(1, 100_000, 1)]
    rooflines = [Roofline(one, find_machine(machine), FORMATS["bf16"], 8) for one in (LLAMA, less)]
    whole, part = (one.step(rows).parts[-1].seconds for one in rooflines)
    assert part == pytest.approx(share * whole)
    assert RooflineCosts(rooflines[1]).step(rows).seconds == pytest.approx(rooflines[1].step(rows).seconds)


def test_equal_rows_can_be_counted_once() -> None:
    roofline, row = Roofline(LLAMA, find_machine("h100"), FORMATS["bf16"], 4), SequenceRows(1, 300, 1)
    assert roofline.step({row: 7}) == roofline.step([row] * 7)


def test_machines_tell_how_far_engines_differ() -> None:
    assert find_machine("h100").spread == SPREAD
    assert find_machine("h100", 0.5).spread == (1.0, 1.0)
    assert {"gb200", "mi300x", "mi355x", "l40s", "rtx-5090", "m4-max", "epyc-9755", "xeon-6980p", "graviton-4"} < set(
        machines()
    )
