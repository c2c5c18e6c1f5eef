"""What binds under a load, how much of TTFT is waiting, and what each lever brings: against exact queues and the
simulated engine."""

from dataclasses import replace

import numpy as np
import pytest

from twostroke.study.plan.changes import ChangeLimits
from twostroke.study.plan.load import PlannedLoad, make_load
from twostroke.study.plan.load_advice import advise_load, excess, load_changes_alone, sharing
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import find_model
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.plan.queueing import waited_in
from twostroke.study.plan.techniques import techniques
from twostroke.study.plan.weights import FORMATS, weight_format
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.machine_setup import machine_setup
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic
from twostroke.study.traffic.workload_sampler import WorkloadSampler as Drawn

LIMITS = ChangeLimits(8, tuple(FORMATS), {})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(
        find_model("llama-3-8b").model, find_machine("h100"), weight_format("bf16"), 1, RequestProfile(2048, 16)
    )


def asked(rate: float, outputs: int = 16, count: int = 1000) -> Traffic:
    return Drawn(count, TokenRange(2048, 2048), TokenRange(outputs, outputs), seed=1).traffic(OpenLoop(rate))


def test_parts_of_a_percentile() -> None:
    """Where every prefill takes 2 s, the rest of each TTFT is waiting."""
    waited = np.random.default_rng(0).exponential(1.0, 10_000)
    for percent in (1.0, 50.0, 99.0, 99.99):
        middle = np.sort(waited)[int(np.ceil(percent / 100 * len(waited))) - 1]
        assert waited_in(waited + 2.0, waited, percent) == pytest.approx(middle, rel=0.03, abs=1e-3)
    assert waited_in(np.array([3.0]), np.array([1.0]), 99) == pytest.approx(1.0)


def test_equal_prompts_wait_for_what_their_prefill_leaves(plan: Plan) -> None:
    """Without decode all prefills take the same time, so TTFT without it is waiting, at any percentile."""
    load = make_load(plan, asked(8.0, outputs=1), Objectives(percent=90))
    assert load.served is not None
    waiting, prefill = load.parts["TTFT"]
    assert waiting + prefill == pytest.approx(load.served.ttft.wanted)
    service = load.served.prefill_share / 8.0
    assert prefill == pytest.approx(service, rel=0.02)


def test_what_binds(plan: Plan) -> None:
    most = make_load(plan, asked(1.0), Objectives()).max_rate
    alone = make_load(plan, asked(0.01 * most), Objectives(percent=50))
    assert alone.binds == {"TTFT": plan.prefill.bound, "ITL": plan.decode().bound}
    busy = make_load(plan, asked(0.8 * most), Objectives(percent=99))
    assert busy.binds == {"TTFT": "queueing", "ITL": "interference"}
    waiting, prefill = busy.parts["TTFT"]
    assert waiting > prefill
    lost = make_load(plan, asked(1.5 * most), Objectives())
    assert (lost.verdict, lost.binds, lost.parts) == ("cannot be served", {"rate": "compute"}, {})
    users = make_load(plan, asked(1.0).in_closed_loop(ClosedLoop(32)), Objectives())
    assert users.binds["TTFT"] == "queueing"
    small = replace(plan, machine=replace(plan.machine, memory=20e9))  # room for one answer
    assert make_load(small, asked(1.5 * most, outputs=1000), Objectives()).binds == {"rate": "memory"}


@pytest.mark.parametrize("method", ["plain", "ptdo"])
def test_waiting_is_that_of_the_engine(plan: Plan, method: str) -> None:
    """At half of the highest rate: the simulated engine's TTFT without a prefill alone."""
    plan = replace(plan, technique=techniques(plan.model)[method])
    rate = 0.5 * make_load(plan, asked(1.0), Objectives()).max_rate
    traffic = asked(rate, count=400)
    service = Simulation(Fleet(machine_setup("llama-3-8b", "h100", weights="bf16", method=method)), traffic)
    service.run()
    measured = np.percentile([call.timings.ttft or 0.0 for call in service.calls], 90)
    load = make_load(plan, traffic, Objectives(percent=90))
    assert load.parts["TTFT"][0] == pytest.approx(measured - plan.prefill.seconds, rel=0.2)
    assert sum(load.parts["TTFT"]) == pytest.approx(measured, rel=0.2)


def under(plan: Plan, rate: float, ttft_s: float | None = None, itl_s: float | None = None) -> PlannedLoad:
    return make_load(plan, asked(rate, outputs=64), Objectives(ttft_s, itl_s))


def test_each_answer(plan: Plan) -> None:
    """Nothing to do has no steps; each other answer has some, in order, and the last one is what they lead to."""
    most = under(plan, 1.0).max_rate
    assert advise_load(under(plan, 1.0, 1.0, 0.1), LIMITS).steps == ()
    for load in (under(plan, 0.9 * most, ttft_s=0.2), under(plan, 3 * most, ttft_s=0.5)):
        assert load.verdict != "nothing to do"
        advised = advise_load(load, LIMITS)
        assert advised.after.verdict == "nothing to do"
        assert advised.steps[0].before is load
        assert advised.steps[-1].change.after is advised.after
        families = [step.change.family for step in advised.steps]
        assert len(set(families)) == len(families)
    assert advise_load(under(plan, 0.9 * most, ttft_s=0.2), LIMITS).steps[0].binds == "queueing"
    hopeless = advise_load(under(plan, 1.0, ttft_s=1e-6), LIMITS)
    assert hopeless.after.verdict == "misses the objective"


def test_a_chunk_that_costs_nothing_comes_before_workers(plan: Plan) -> None:
    """A step's length is what ITL misses: shorter steps are enough, and no device is asked for."""
    load = under(plan, 2.0, itl_s=0.012)
    assert load.binds["ITL"] == "interference"
    assert load.missed == ["ITL"]
    [step] = advise_load(load, LIMITS).steps
    assert (step.change.family, step.binds) == ("chunks", "interference")
    assert step.change.after.budget < load.budget


def test_levers_bring_what_their_own_load_says(plan: Plan) -> None:
    load = under(plan, 0.9 * under(plan, 1.0).max_rate, ttft_s=0.2)
    by_family = {one.family: one.after for one in load_changes_alone(load, LIMITS)}
    assert set(by_family) == {"chunks", "workers", "devices", "weights", "prompts", "rate"}
    workers = by_family["workers"]
    assert load.rate is not None
    alone = under(plan, load.rate / workers.replicas, ttft_s=0.2)
    assert workers.parts["TTFT"] == pytest.approx(alone.parts["TTFT"])
    assert by_family["rate"].verdict == "nothing to do"
    assert by_family["rate"].rate == pytest.approx(load.max_rate_within)
    assert all(excess(one) < excess(load) for name, one in by_family.items() if name != "chunks")


def test_prompts_that_begin_alike() -> None:
    traffic = Drawn(5, TokenRange(40, 60), TokenRange(1, 1), prefix_tokens=20, seed=1).traffic(OpenLoop(1.0))
    made = sharing(traffic, 30)
    assert made.prompts.tolist() == traffic.prompts.tolist()
    assert made.shared.tolist() == [0, 30, 30, 30, 30]
    assert sharing(traffic, 100).shared.tolist() == traffic.shared.tolist(), "no prompt is as long"
