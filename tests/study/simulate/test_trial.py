"""Short simulations in a steady state: what begins under way, what is counted, and when a trial ends early."""

from dataclasses import replace

import pytest

from tests.page_audit import leaked
from twostroke.study.simulate.engine_setup import machine_setup
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.simulation import BegunRequest, Simulation
from twostroke.study.simulate.trial import Trial, try_load
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import ClosedLoop, OpenLoop, PromptPiece, Replay, Traffic, TrafficRequest
from twostroke.study.traffic.workload_sampler import TokenRange, WorkloadSampler

SETUP = machine_setup("llama-3-8b", "h100")
FREE = Objectives()


def drawn(count: int, rate: float, prompt: int = 512, output: int = 16) -> Traffic:
    lengths = TokenRange(prompt, prompt), TokenRange(output, output)
    return WorkloadSampler(count, *lengths, seed=1).traffic(OpenLoop(rate))


def begun(count: int, prompt: int = 512, output: int = 64, made: int = 8) -> list[BegunRequest]:
    pieces = [(PromptPiece(1_000_000 + i, prompt),) for i in range(count)]
    return [BegunRequest(TrafficRequest(0.0, one, output), made) for one in pieces]


def test_a_trial_tells_what_the_whole_simulation_does() -> None:
    """TTFT of all requests, and all gaps of those that had ended by then."""
    traffic, whole = drawn(12, 50.0), list[float]()
    Simulation(Fleet(SETUP), traffic, ended=lambda call: whole.append(call.tokens[0] - call.arrival)).run()
    trial = try_load(Fleet(SETUP), traffic, FREE)
    assert sorted(trial.ttft) == pytest.approx(sorted(whole))
    assert trial.missed == []
    assert 0 < trial.sequences < 12


def test_what_is_under_way_decodes_from_the_start() -> None:
    """Their prompts are not computed, and each of their gaps is a decode step of as many as are under way."""
    late = Traffic([replace(drawn(1, 1.0).arrivals[0], at=0.2)], Replay((0.2,)))
    simulation = Simulation(Fleet(SETUP), late, begun=begun(5))
    assert len(simulation.begun) == 5
    simulation.run()
    for call in simulation.begun:
        made = [at for at in call.tokens if at > 0]
        assert len(made) == 64 - 8 - 1, "the logits of one more are there"
        assert call.entered == 0
    assert leaked(simulation) == 0
    alone = try_load(Fleet(SETUP), late, FREE)
    beside = try_load(Fleet(SETUP), late, FREE, begun(5))
    assert beside.sequences > alone.sequences


def test_what_has_no_room_is_left_out() -> None:
    small = replace(SETUP, pages=100)  # 1,600 entries: three prompts of 512
    simulation = Simulation(Fleet(small), drawn(1, 1.0), begun=begun(5))
    assert len(simulation.begun) == 3
    simulation.run()
    assert leaked(simulation) == 0


def test_users_under_way_are_among_those_at_once() -> None:
    traffic = drawn(6, 1.0).in_closed_loop(ClosedLoop(3))
    simulation = Simulation(Fleet(SETUP), traffic, begun=begun(2))
    for _ in range(3):
        simulation.events.step()
    assert simulation.came == 1
    simulation.run()
    assert simulation.came == 6


def test_a_trial_ends_when_it_is_lost() -> None:
    """More miss an objective than may: the rest is not simulated."""
    traffic = drawn(60, 1e4)
    lost = try_load(Fleet(SETUP), traffic, Objectives(ttft_s=0.05))
    assert lost.missed == ["TTFT"]
    assert float("inf") in lost.ttft
    kept = try_load(Fleet(SETUP), traffic, Objectives(ttft_s=100.0))
    assert kept.missed == []
    assert float("inf") not in kept.ttft
    slow = try_load(Fleet(SETUP), drawn(200, 100.0), Objectives(itl_s=1e-6))
    assert slow.missed == ["ITL"]
    assert len(slow.ttft) < 200


def test_rates_of_first_tokens() -> None:
    trial = Trial(FREE, [], [], 0.0, [float(i) / 4 for i in range(20)])
    assert trial.first_token_rate == pytest.approx(4)
    assert trial.at([1.0, 2.0, 3.0], 50) == 2.0
    assert trial.at([]) is None
