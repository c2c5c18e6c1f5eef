"""The space of configurations, and the cheapest of them."""

import functools
from dataclasses import replace
from typing import Any

import pytest

from twostroke.study.plan.account import account
from twostroke.study.plan.changes import ChangeLimits, changes_alone
from twostroke.study.plan.loads import drawn_traffic
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.plan.search import Advice, LoadSearch, advise, describe
from twostroke.study.plan.service import LoadSimulator
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.techniques import Companion, techniques
from twostroke.study.roofline.weight_formats import FORMATS
from twostroke.study.traffic.objectives import Objectives

LLAMA, SMALL = specifications()["llama-3.1-70b"], specifications()["llama-3.1-8b"]
KNOWN = techniques(LLAMA, Companion(SMALL, FORMATS["bf16"]))
FEW = ("bf16", "int8-w8a8")
LIMITS = ChangeLimits(8, tuple(FORMATS), KNOWN)


def plan(tp: int = 1, weights: str = "bf16", technique: str = "plain", **load: Any) -> Plan:
    workload = RequestProfile(**({"prompt": 4096, "output": 256} | load))
    return make_plan(LLAMA, find_machine("h100"), FORMATS[weights], tp, workload, KNOWN[technique])


def test_two_ways_out() -> None:
    """The mildest change on the devices that there are, and the fewest devices that give the same answers."""
    advice = advise(plan(ttft_ms=800, itl_ms=50), LIMITS)
    assert advice.same is not None
    assert advice.more is not None
    assert advice.same.plan.devices == 1
    assert advice.same.plan.weights.layer < 1  # 70 GB of 8-bit weights leave no room
    assert describe(advice.more.candidate) == "tensor parallelism of 2"
    assert advice.same.enough
    assert advice.more.enough
    assert not advice.asked.enough


def test_nothing_is_advised_where_nothing_is_wrong_or_nothing_helps() -> None:
    fine = advise(plan(4, ttft_ms=500), LIMITS)
    assert (fine.same, fine.more) == (None, None)
    assert fine.cheapest is not None
    assert fine.cheapest.plan.devices < 4, "fewer devices would do, with other weights"
    lost = advise(plan(ttft_ms=1), LIMITS)
    assert (lost.same, lost.more, lost.cheapest) == (None, None, None)


def test_every_dimension_is_a_change_alone() -> None:
    """Formats that the machine multiplies, KV bits, degrees, techniques, and other requests."""
    names = {describe(one) for one in changes_alone(plan(concurrency=4), LIMITS)}
    assert {"fp8 weights, fp8 products", "int4 weights, int8 products", "KV in 8 bits"} < names
    assert {"tensor parallelism of 8", "prompts of half the length", "2 at once"} < names
    assert not any("nvfp4" in name for name in names), "this machine multiplies no FP4"
    repeated = {describe(one) for one in changes_alone(plan(technique="repeat"), LIMITS)}
    assert "PTDO (prefill twice, decode once)" in repeated
    engine = ChangeLimits(1, ("bf16", "int8-w8a8", "int4-w4a8"), KNOWN, apart=False)
    assert not any("parallel" in describe(one) for one in changes_alone(plan(), engine))


def searched(rate: float, tp: int = 1, ttft_s: float = 0.5, machine: str = "rtx-4090") -> LoadSearch:
    profile = RequestProfile(1024, 16, ttft_ms=1e3 * ttft_s)
    made = make_plan(SMALL, find_machine(machine), FORMATS["bf16"], tp, profile)
    load = LoadSimulator(drawn_traffic(profile, rate, None, 1.0, False), Objectives(ttft_s))
    return LoadSearch(made, ChangeLimits(4, FEW, techniques(SMALL)), load)


@functools.cache
def advised(rate: float) -> tuple[LoadSearch, Advice]:
    search = searched(rate)
    return search, search.advice()


def test_a_load_with_two_ways_out() -> None:
    """Eight-bit products serve on one card what two serve with the same answers."""
    search, advice = advised(10.0)
    assert advice.asked.service is not None
    assert advice.asked.service.verdict == "cannot be served"
    assert advice.same is not None
    assert advice.more is not None
    assert advice.same.plan.devices == 1
    assert advice.more.plan.weights.name == "bf16"
    for way in (advice.same, advice.more):
        assert way.enough
        assert way.service is not None
        assert way.service.within is not None
        assert way.service.within >= 10.0
    rates = [rate for _, rate, _ in advice.frontier]
    assert rates == sorted(rates)
    facts = account(advice, search.limits, search.load, price=2.0)
    assert facts["verdict"] == facts["load"]["verdict"] == "cannot be served"
    assert facts["ways_out"]["more_devices"]["price_per_hour"] == 2.0 * advice.more.plan.devices
    assert facts["ways_out"]["more_devices"]["watts"] == 450 * advice.more.plan.devices
    low, high = facts["load"]["range"]
    assert low < facts["ways_out"]["same_devices"]["requests_per_second"] < high


@pytest.mark.parametrize("rate", [10.0, 30.0])
def test_no_fewer_workers_would_be_enough(rate: float) -> None:
    """Arithmetic promises less than these cards keep: what it says first is not what is advised."""
    search, advice = advised(rate)
    assert advice.more is not None
    workers = advice.more.plan.workers
    assert workers > 1
    assert search.load.enough(advice.more.plan, rate, 2)
    assert not search.load.enough(replace(advice.more.plan, workers=workers - 1), rate, 2)


def test_fewer_devices_where_they_are_enough() -> None:
    advice = searched(2.0, tp=4, machine="h100").advice()
    assert advice.asked.enough
    assert (advice.same, advice.more) == (None, None)
    assert advice.cheapest is not None
    assert advice.cheapest.plan.devices == 1


def test_the_fewest_devices_where_none_that_was_asked_for_is_enough() -> None:
    """The same answers take more of them than answers to be checked, and what is advised is the cheapest."""
    _, advice = advised(30.0)
    assert advice.same is not None
    assert not advice.same.enough
    assert advice.more is not None
    assert advice.cheapest is not None
    assert advice.cheapest.enough
    assert advice.cheapest.plan.devices < advice.more.plan.devices
    assert advice.cheapest.plan.weights.name == "int8-w8a8"
    assert advice.best is advice.cheapest


def test_users_are_searched_for_too() -> None:
    profile = RequestProfile(1024, 16, itl_ms=16)
    made = make_plan(SMALL, find_machine("rtx-4090"), FORMATS["bf16"], 1, profile)
    load = LoadSimulator(drawn_traffic(profile, None, 2, 1.0, False), Objectives(itl_s=0.016, percent=50))
    advice = LoadSearch(made, ChangeLimits(4, FEW, techniques(SMALL)), load).advice()
    assert advice.asked.service is not None
    assert advice.asked.service.missed == ["ITL"]
    assert advice.same is not None
    assert advice.same.enough


@pytest.mark.parametrize("tp", [4, 8])
def test_the_account_has_the_plan_s_figures(tp: int) -> None:
    made = replace(plan(tp, ttft_ms=200, itl_ms=50, concurrency=8))
    facts = account(advise(made, LIMITS), LIMITS)
    assert facts["verdict"] == made.verdict
    assert facts["missed"] == made.missed()
    assert (facts["prefill"]["ms"], facts["decode"]["ms"]) == (made.ttft_ms, made.itl_ms)
    assert [row["devices"] for row in facts["tensor_parallelism"]] == [1, 2, 4, 8, 16]
    assert facts["memory"]["kv_bytes_per_token"] == 327_680
