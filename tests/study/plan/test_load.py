"""A plan under a load: three answers, workers apart or together, tiers, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from twostroke.errors import InvalidRequest
from twostroke.study.plan.changes import ChangeLimits
from twostroke.study.plan.load import PlannedLoad, drawn_traffic, make_load, mean_profile
from twostroke.study.plan.load_account import load_facts
from twostroke.study.plan.load_advice import advise_load
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import find_model
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.plan.weights import FORMATS, weight_format
from twostroke.study.traffic.arrivals import OpenLoop
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.workload_sampler import WorkloadSampler as Drawn

LIMITS = ChangeLimits(8, tuple(FORMATS), {})


def plan(prompt: int = 1024, output: int = 128, tp: int = 4) -> Plan:
    model, form = find_model("llama-3-70b").model, weight_format("bf16")
    return make_plan(model, find_machine("h100"), form, tp, RequestProfile(prompt, output))


def facts_of(load: PlannedLoad) -> dict[str, Any]:
    return load_facts(load, LIMITS, advise_load(load, LIMITS))


def under(made: Plan, rate: float, ttft_s: float | None = None, itl_s: float | None = None) -> PlannedLoad:
    load = made.workload
    lengths = TokenRange(load.prompt, load.prompt), TokenRange(load.output, load.output)
    return make_load(made, Drawn(1500, *lengths, seed=1).traffic(OpenLoop(rate)), Objectives(ttft_s, itl_s))


def test_three_answers() -> None:
    made = plan()
    free = under(made, 1.0)
    assert free.verdict == "nothing to do"
    assert free.served is not None
    assert 0 < free.max_rate == free.max_rate_within
    within = under(made, 1.0, ttft_s=0.4, itl_s=0.05)
    assert 0 < within.max_rate_within < within.max_rate
    missed = under(made, 0.95 * free.max_rate, ttft_s=0.1)
    assert (missed.verdict, missed.missed) == ("misses the objective", ["TTFT"])
    lost = under(made, 1.1 * free.max_rate)
    assert (lost.verdict, lost.served) == ("cannot be served", None)
    facts = facts_of(lost)
    assert facts["most_requests_per_second"] == pytest.approx(free.max_rate)
    assert facts["workers_needed"] == 2
    assert facts["served"] is None


def test_what_is_used_and_needed() -> None:
    made = plan()
    facts = facts_of(under(made, 1.0, ttft_s=1.0, itl_s=0.1))
    used = facts["served"]["utilization"]
    assert set(used) == {"prefill", "decode"}
    for one in used.values():
        assert 0 < one["time"] < 1
        assert 0 < one["compute"] <= made.machine.compute + 1e-9
        assert 0 < one["bandwidth"] <= made.machine.memory_share + 1e-9
    assert used["prefill"]["compute"] > used["decode"]["compute"]
    assert used["decode"]["bandwidth"] > used["prefill"]["bandwidth"]
    assert facts["apart"]["link_bytes_per_second"] == pytest.approx(made.model.kv_bytes(1024))
    assert 0 < sum(one["time"] for one in used.values()) < 1


def test_a_tier_pays_above_the_bandwidth_that_a_prefill_gives() -> None:
    made = plan()
    slow = replace(
        made.machine, host=0.9 * made.break_even_bandwidth / made.machine.link_share, disk=3e9, loopback=None
    )
    tiers = {one["tier"]: one for one in facts_of(under(replace(made, machine=slow), 1.0))["tiers"]}
    assert set(tiers) == {"host memory", "another device", "disk"}
    assert not tiers["host memory"]["pays"]
    assert tiers["host memory"]["times"] == pytest.approx(0.9)
    assert tiers["another device"]["pays"]
    assert tiers["disk"]["pays"] == (made.break_even_bandwidth < 3e9)


def test_to_disaggregate_or_not() -> None:
    """Long prompts under a tight ITL gain by workers of their own; without a link, or without an objective, none do."""
    made = plan(prompt=4096, output=256)
    tight = under(made, 5.0, ttft_s=2.0, itl_s=0.025)
    assert tight.max_rate_within < 0.1 < tight.rate_apart
    assert tight.apart[0]
    assert tight.workers_apart is not None
    assert min(tight.workers_apart) >= 1
    assert facts_of(tight)["apart"]["prefill_workers_per_decode_worker"] == pytest.approx(
        tight.decode_rate / tight.prefill_rate
    )
    assert under(made, 0.5).apart == (False, "one worker carries this rate")
    assert under(made, 9.0).apart == (False, "it serves no more requests a worker")
    unlinked = replace(made, tp=1, machine=replace(made.machine, link=None, host=None, memory=1e12))
    assert under(unlinked, 0.05).apart == (False, "the link is unknown")
    assert not under(made, 0.5, ttft_s=0.01).apart[0]


def test_users_instead_of_a_rate() -> None:
    made = plan()
    load = make_load(
        made, drawn_traffic(made.workload, None, 16, 1.0, sharegpt=False), Objectives(ttft_s=10.0, itl_s=1e-4)
    )
    assert load.closed is not None
    assert load.closed.users == 16
    assert 0 < load.closed.sequences < 16
    assert load.closed.rate < load.max_rate
    assert load.missed == ["ITL"]
    assert load.rate is None


def test_shapes_of_distributions() -> None:
    traffic = drawn_traffic(RequestProfile(1, 1), 2.0, None, 1.0, sharegpt=True)
    shape = mean_profile(traffic, 100.0, None)
    assert shape.prompt == pytest.approx(np.mean(traffic.prompts), abs=1)
    assert (shape.shared, shape.ttft_ms) == (0, 100.0)
    shared = drawn_traffic(RequestProfile(100, 5, shared=60), 2.0, None, 1.0, sharegpt=False)
    assert mean_profile(shared, None, None).shared == 59, "the first prompt computes what all share"
    assert int(shared.shared[1]) == 60


def test_what_is_refused() -> None:
    made = plan()
    with pytest.raises(InvalidRequest, match="8192 positions"):
        make_load(made, Drawn(10, TokenRange(9000, 9000), TokenRange(1, 1)).traffic(OpenLoop(1.0)), Objectives())
