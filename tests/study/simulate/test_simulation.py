"""A fleet under traffic, as a whole."""

from dataclasses import replace

from twostroke.study.simulate.figures import SimulationFigures
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.machine_setup import machine_setup
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.traffic.arrivals import OpenLoop
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.workload_sampler import WorkloadSampler


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
