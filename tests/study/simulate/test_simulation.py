"""A fleet under traffic: the times of tokens by hand, and what a long run leaves behind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from twostroke.engine.scheduler import SchedulerConfig
from twostroke.models.cost import SequenceRows
from twostroke.study.roofline.named_models import find_model
from twostroke.study.simulate.engine_setup import EngineSetup, HttpOverhead, machine_setup
from twostroke.study.simulate.figures import SimulationFigures
from twostroke.study.simulate.fleet import Fleet, KvLink
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.simulate.step_costs import StepCost
from twostroke.study.simulate.timeline import Timeline, TimelineInterval
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import OpenLoop, PromptPiece, Replay, Traffic, TrafficRequest
from twostroke.study.traffic.workload_sampler import TokenRange, WorkloadSampler

LLAMA = find_model("llama-3-8b").model


def test_a_million_requests_leave_little_behind() -> None:
    """Calls are dropped when they have ended, and a router's heap stays as small as its fleet."""
    setup = replace(machine_setup("llama-3-8b", "h100"), pages=120)
    traffic = WorkloadSampler(400, TokenRange(8, 16), TokenRange(1, 2), seed=3).traffic(OpenLoop(100.0))
    found = SimulationFigures(Objectives())
    service = Simulation(Fleet(setup, 2), traffic, found.watch, found.ended, keep=False)
    service.run()
    assert found.summary(service)["completed"] == 400
    assert service.came == 400
    assert not service.calls
    assert not any(worker.calls for worker in service.workers)
    assert len(service.router._order) < 100  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_preempted_waits_in_the_queue_again() -> None:
    """In a pool for three of eight: each preempted call waits, no other does, and its tokens come so much later."""
    setup = replace(machine_setup("llama-3-8b", "h100"), pages=64)
    traffic = WorkloadSampler(8, TokenRange(200, 200), TokenRange(150, 150), seed=3).traffic(OpenLoop(1e4))
    service = Simulation(Fleet(setup), traffic)
    service.run()
    assert any(call.preemptions for call in service.calls)
    for call in service.calls:
        assert (call.requeued_s > 0) == (call.preemptions > 0)
        gaps = [after - before for before, after in pairwise([call.arrival, *call.tokens])]
        assert call.queue_s <= sum(gap for gap in gaps if gap > 0.02) + 0.02
        assert call.scheduled is not None
        assert call.queue_s == call.scheduled - call.arrival + call.requeued_s


@dataclass(frozen=True)
class EqualSteps:
    """Implements `StepCostModel`: every step takes a second, and each of its tokens 1/16."""

    host_s: float = 0.0
    token_s: float = 0.0
    peak: StepCost | None = None
    stalls: tuple[float, ...] = ()

    def step(self, rows: Sequence[SequenceRows]) -> StepCost:
        return StepCost(1 + sum(one.count for one in rows) / 16, 0.0, 0.0)


def run(*requests: tuple[float, int, int], workers: int = 1, **settings: Any) -> tuple[Simulation, list[list[float]]]:
    """Serve requests of (arrival, prompt tokens, output tokens); returns when each token came."""
    costs = settings.pop("costs", EqualSteps())
    fleet = {name: settings.pop(name) for name in ("router", "link", "prefill", "decode") if name in settings}
    setup = EngineSetup(LLAMA, costs, 1000, index="off", **settings)
    arrivals = [
        TrafficRequest(at, (PromptPiece(i, prompt),), output) for i, (at, prompt, output) in enumerate(requests)
    ]
    traffic = Traffic(arrivals, Replay(tuple(at for at, _, _ in requests)))
    simulation = Simulation(Fleet(setup, workers, **fleet), traffic)
    simulation.run()
    return simulation, [one.tokens for one in simulation.calls]


def test_one_request_by_hand() -> None:
    """The prefill of 16 tokens takes 2 s, and each step of one token 1 + 1/16."""
    _, ((*times,),) = run((5.0, 16, 4))
    assert times == [7.0, 8.0625, 9.125, 10.1875]


def test_host_time_and_stalls_by_hand() -> None:
    """Python adds a quarter before each step and an eighth behind each token; every second step stalls for 2 s."""
    _, ((*times,),) = run((0.0, 16, 3), costs=EqualSteps(0.25, 0.125, stalls=(0.0, 2.0)))
    first = 0.25 + 2.0 + 0.125
    second = first + 0.25 + 1.0625 + 2.0 + 0.125
    assert times == [first, second, second + 0.25 + 1.0625 + 0.125]


def test_chunks_by_hand() -> None:
    """A prompt of 40 tokens in steps of 16 takes three; one of 8 that comes during the first shares the second."""
    _, (long, short) = run((0.0, 40, 1), (0.5, 8, 1), scheduler=SchedulerConfig(max_step_tokens=16))
    assert short == [4.0]  # 16 tokens: 2 s until 2.0, then 8 of its own and 8 of the long prompt
    assert long == [6.0]  # 16 + 8 + 16


def test_decodes_share_a_step_with_a_prefill() -> None:
    _, (first, second) = run((0.0, 16, 3), (1.0, 16, 1))
    assert first == [2.0, 2.0 + 1 + 17 / 16, 2.0 + 1 + 17 / 16 + 17 / 16]
    assert second == [2.0 + 1 + 17 / 16]


def test_two_workers_take_turns_by_hand() -> None:
    """Each of two requests has an engine of its own, and the third comes to the first again."""
    _, times = run((0.0, 16, 1), (0.0, 16, 1), (1.0, 16, 1), workers=2, router="round-robin")
    assert times == [[2.0], [2.0], [4.0]]


def test_disaggregation_by_hand() -> None:
    """The first token comes with the KV: after a prefill, and bytes / rate + latency on the link."""
    link = KvLink(LLAMA.kv_bytes(16), 0.5)  # 16 entries a second
    simulation, (times,) = run((0.0, 32, 2), workers=0, prefill=1, decode=1, link=link)
    arrived = 3.0 + 32 / 16 + 0.5
    assert times == [arrived, arrived + 1.0625]
    assert simulation.transfers.moved_bytes == LLAMA.kv_bytes(32)


def test_a_timeline_by_hand() -> None:
    """A step gives each interval its share."""
    timeline = Timeline(1.0)
    timeline.add(0.5, 2.5, TimelineInterval(busy_s=2.0, decode=8.0))
    timeline.add(2.5, 2.75, TimelineInterval(busy_s=0.25, prefill=3.0))
    assert [(one.busy_s, one.prefill, one.decode) for one in timeline.intervals] == [
        (0.5, 0.0, 2.0), (1.0, 0.0, 4.0), (0.75, 3.0, 2.0),
    ]  # fmt: skip


def test_http_by_hand() -> None:
    """A request's way, and tokens that are late as measured, one after the other, but never overtake each other."""
    http = HttpOverhead(0.5, 0.25, (0.0, 3.0, 0.0))
    assert http.request_delay(4) == 1.5
    assert {tuple(http.delivery_times(number, [1.0, 2.0, 3.0])) for number in range(20)} == {
        (1.0, 5.0, 5.0), (4.0, 4.0, 4.0), (1.0, 2.0, 6.0),
    }  # fmt: skip
    assert HttpOverhead().delivery_times(0, [1.0, 2.0]) == [1.0, 2.0]
