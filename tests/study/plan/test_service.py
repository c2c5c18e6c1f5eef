"""A plan under a load: the simulator's answers, against arithmetic and against whole simulations."""

from dataclasses import replace

import numpy as np
import pytest

from twostroke.errors import InvalidRequest
from twostroke.study.plan.capacity import WorkerPace, capacity, in_flight, pace, tuned
from twostroke.study.plan.loads import busy_stretch, drawn_traffic, mean_profile, part_at_rate, require_load
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.plan.service import SEEDS, LoadSimulator, fleet_of
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.weight_formats import weight_format
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic

MODEL = specifications()["llama-3-8b"]


def plan(prompt: int = 1024, output: int = 16, itl_ms: float | None = None, machine: str = "h100") -> Plan:
    profile = RequestProfile(prompt, output, itl_ms=itl_ms)
    return make_plan(MODEL, find_machine(machine), weight_format("bf16"), 1, profile)


def under(made: Plan, rate: float, ttft_s: float | None = None, itl_s: float | None = None) -> LoadSimulator:
    return LoadSimulator(drawn_traffic(made.workload, rate, None, 1.0, False), Objectives(ttft_s, itl_s))


def test_four_answers() -> None:
    made = plan()
    free = under(made, 5.0).served(made, 1)
    assert free.highest is not None
    assert (free.verdict, free.within) == ("nothing to do", free.highest)
    missed = under(made, 0.8 * free.highest, ttft_s=0.04).served(made, 1)
    assert (missed.verdict, missed.missed) == ("misses the objective", ["TTFT"])
    assert (missed.within or 0.0) < 0.8 * free.highest
    assert missed.binds["TTFT"] == "queueing"
    assert under(made, 1.2 * free.highest).served(made, 1).verdict == "cannot be served"
    large = replace(made, model=specifications()["llama-3-70b"])
    served = under(made, 1.0).served(large, 1)
    assert (served.verdict, served.highest, served.binds) == ("does not fit", 0.0, {"memory": "memory"})


def test_the_highest_rate_is_that_of_the_arithmetic_where_nobody_waits_for_others() -> None:
    """Long prompts and answers of one token: the rate is one over the seconds of the chunks."""
    made = plan(prompt=2048, output=1)
    seconds = made.chunked_ttft(512)
    assert under(made, 1.0).highest(made) == pytest.approx(1 / seconds, rel=0.02)
    assert capacity(made) == pytest.approx(1 / seconds, rel=0.04)


def test_the_highest_rate_within_keeps_the_objectives_in_a_long_simulation() -> None:
    """At nine tenths of it, and not at three tenths more, over the draws by which it was found."""
    made = plan()
    load = under(made, 1.0, ttft_s=0.3)
    within = load.within(made)
    assert 0 < within <= load.highest(made)
    missed = list[float]()
    for rate in (0.9 * within, 1.3 * within):
        ttft = list[float]()
        for seed in range(SEEDS):
            some = part_at_rate(load.traffic, rate, 1, seed)[:400]
            asked = Traffic.replayed(some, 1)
            ended = lambda call, ttft=ttft: ttft.append(call.tokens[0] - call.arrival)  # noqa: E731
            Simulation(fleet_of(made), asked, ended=ended).run()
        missed.append(float(np.mean(np.array(ttft) > 0.3)))
    assert missed[0] < 0.03 < missed[1]


def test_a_busy_stretch_ends_with_the_request_that_waits_as_long_as_asked_for() -> None:
    """Of a hundred requests two come together, and each takes half of the time between two others: one waits."""
    traffic = drawn_traffic(RequestProfile(100, 1), 1.0, None, 1.0, False)
    some = traffic.arrivals[:100]
    times = [49.1 if i == 50 else float(i) for i in range(100)]
    pace = WorkerPace((0.0, 2.0, 4.0), (0.5, 0.5, 0.5))
    found = busy_stretch(Traffic(some, traffic.pattern), times, pace, 1.0, 99.5)
    stretch = found.traffic
    assert stretch.arrivals[-1].pieces == some[50].pieces
    assert len(stretch.arrivals) >= 24
    assert stretch.arrivals[-1].at - stretch.arrivals[-2].at == pytest.approx(0.1)
    assert found.wait == pytest.approx(0.9)


@pytest.mark.nightly  # half a minute; the arithmetic of it is tested above
def test_the_tail_of_a_load_that_waits_for_room_is_that_of_a_long_simulation() -> None:
    """Near the highest rate as many run as have room, and others wait: by the seconds of a prompt alone none would."""
    made = replace(plan(prompt=128, output=16), max_running=3)
    rate = 0.85 * under(made, 1.0).highest(made)
    tails = under(made, rate).at(made, rate, 3).tails
    traffic = drawn_traffic(made.workload, rate, None, 1.0, False)
    ttft = list[float]()
    Simulation(fleet_of(made), traffic, ended=lambda call: ttft.append(call.tokens[0] - call.arrival)).run()
    assert float(np.percentile(ttft, 99)) > 5 * made.prefill.seconds
    assert min(tails) / 1.2 < float(np.percentile(ttft, 99)) < 1.2 * max(tails)


def test_requests_in_turn_come_more_evenly() -> None:
    """Every fourth of random ones: gaps have half of the deviation."""
    traffic = drawn_traffic(RequestProfile(100, 1), 8.0, None, 1.0, False)
    for part in (1, 4):
        gaps = np.diff([one.at for one in part_at_rate(traffic, 8.0, part, 0)])
        assert gaps.mean() == pytest.approx(part / 8, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(part**-0.5, rel=0.1)


def test_each_of_many_workers_has_the_pace_of_one() -> None:
    """It is simulated alone with its part of the requests, so as many are in flight as at its part of the rate."""
    made = plan()
    fleet, one = replace(made, workers=4), pace(made)
    assert pace(fleet) == one
    rate = 0.7 * under(made, 1.0).highest(made)
    assert in_flight(fleet, one, 4 * rate) == in_flight(made, one, rate) > 1
    traffic = drawn_traffic(made.workload, 4 * rate, None, 1.0, False)
    trial = LoadSimulator(traffic, Objectives()).at(fleet, 4 * rate).trials[0]
    alone = under(made, rate).at(made, rate).trials[0]
    assert trial.sequences == pytest.approx(alone.sequences, rel=0.35)


def test_workers_have_their_part_of_the_rate() -> None:
    made = plan()
    load = under(made, 1.0, ttft_s=0.3)
    assert load.highest(replace(made, workers=3)) == pytest.approx(3 * load.highest(made))


def test_as_many_are_under_way_as_a_steady_state_has() -> None:
    """Rate x seconds of an answer: what begins under way stays as many."""
    made = plan(output=64)
    rate = 0.5 * capacity(made)
    load = under(made, rate)
    sequences = load.served(made, 2).sequences
    assert sequences == pytest.approx(in_flight(made, pace(made), rate), rel=0.35, abs=1)


def test_steps_are_chosen_that_keep_the_objective_for_itl() -> None:
    """Chunks of 512 tokens take longer than the objective on this card, and shorter ones do not."""
    made = plan(prompt=2048, output=256, itl_ms=50, machine="rtx-4090")
    assert capacity(made) == 0
    better = tuned(made)
    assert better.budget == 256
    assert capacity(better) > 0


def test_apart_and_users() -> None:
    """Workers of one stroke are simulated together; users have means of their own and no rate."""
    made = replace(plan(), workers=2, prefill_workers=1)
    served = under(made, 3.0, ttft_s=1.0, itl_s=0.1).served(made, 1)
    assert served.verdict == "nothing to do"
    users = LoadSimulator(drawn_traffic(made.workload, None, 4, 1.0, False), Objectives(10.0, 1e-4))
    closed = users.served(plan(), 1)
    assert (closed.rate, closed.highest, closed.missed) == (None, None, ["ITL"])
    assert 0 < closed.sequences < 4


def test_shapes_of_distributions() -> None:
    traffic = drawn_traffic(RequestProfile(1, 1), 2.0, None, 1.0, sharegpt=True)
    shape = mean_profile(traffic, 100.0, None)
    assert shape.prompt == pytest.approx(np.mean(traffic.prompts), abs=1)
    assert (shape.shared, shape.ttft_ms) == (0, 100.0)
    shared = drawn_traffic(RequestProfile(100, 5, shared=60), 2.0, None, 1.0, sharegpt=False)
    assert mean_profile(shared, None, None).shared == 59, "the first prompt computes what all share"
    assert int(shared.shared[1]) == 60


def test_what_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="8192 positions"):
        require_load(MODEL, drawn_traffic(RequestProfile(9000, 1), 1.0, None, 1.0, False))
