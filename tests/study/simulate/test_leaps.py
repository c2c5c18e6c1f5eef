"""Steps that are taken together: the same figures to the last bit as one by one, and fewer calls of the engine."""

from dataclasses import replace
from typing import Any

import pytest

from twostroke.engine.scheduler import SchedulerConfig
from twostroke.study.simulate.costs import Peaks
from twostroke.study.simulate.figures import Figures
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.front import Front
from twostroke.study.simulate.machines import machine_setup
from twostroke.study.simulate.service import Service
from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop
from twostroke.study.traffic.lengths import Range
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.workload import Workload

PAGES = 120  # so few that prefix indexes lose pages all the time
COSTS = machine_setup("llama-3-8b", "h100").costs


SHORT, LONG = (Workload(60, Range(*prompt), Range(20, 120), 64, 5, seed=3) for prompt in ((20, 200), (300, 900)))


def figures(
    workers: int, pattern: OpenLoop | ClosedLoop, leaps: bool, pages: int, workload: Workload = SHORT, chunk: int = 512
) -> tuple[Any, ...]:
    """All figures of a run, when each token came, and calls of an engine's step."""
    assert isinstance(COSTS, Peaks)
    costs = Peaks(COSTS.roofline, 1e-4, 1e-5)
    costs.stalls = (0.0, 0.0, 0.003, 0.0, 0.0)
    scheduler = SchedulerConfig(max_step_tokens=chunk)
    setup = replace(machine_setup("llama-3-8b", "h100"), costs=costs, pages=pages, scheduler=scheduler)
    setup = replace(setup, front=Front(0.002, 1e-6, (0.0, 0.001, 0.02, 0.0)))
    traffic = workload.traffic(pattern)
    found = Figures(Objectives(0.1, 0.05))
    service = Service(Fleet(setup, workers, router="kv-aware"), traffic, found.watch, found.ended, leaps)
    taken = [0]
    for worker in service.workers:
        step = worker.engine.step

        def counted(step: Any = step) -> bool:
            taken[0] += 1
            return step()

        worker.engine.step = counted
    service.run()
    evicted = sum(worker.engine.evicted_pages for worker in service.workers)
    over_time = found.over_time(service) if workers == 1 else None  # else sums are of another order
    return found.summary(service), over_time, [one.tokens for one in service.calls], evicted, taken[0]


@pytest.mark.parametrize("pattern", [OpenLoop(10.0), ClosedLoop(3)], ids=["open", "closed"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("pages", [PAGES, 10_000], ids=["few pages", "many pages"])
def test_the_same_figures(workers: int, pattern: OpenLoop | ClosedLoop, pages: int) -> None:
    *leapt, few = figures(workers, pattern, True, pages)
    *stepped, many = figures(workers, pattern, False, pages)
    assert leapt == stepped
    assert few < many / 2
    assert (leapt[3] > 100) == (pages == PAGES), "evicted pages"


@pytest.mark.parametrize("pages", [300, 10_000], ids=["few pages", "many pages"])
def test_steps_in_the_midst_of_prompts(pages: int) -> None:
    """Prompts of 20 chunks, several of them at once."""
    *leapt, few = figures(2, OpenLoop(15.0), True, pages, LONG, 32)
    *stepped, many = figures(2, OpenLoop(15.0), False, pages, LONG, 32)
    assert leapt == stepped
    assert few < many / 3
    assert (leapt[3] > 100) == (pages == 300), "evicted pages"


def test_a_million_requests_leave_little_behind() -> None:
    """Calls are dropped when they have ended, and a router's heap stays as small as its fleet."""
    setup = replace(machine_setup("llama-3-8b", "h100"), pages=PAGES)
    traffic = Workload(400, Range(8, 16), Range(1, 2), seed=3).traffic(OpenLoop(100.0))
    found = Figures(Objectives())
    service = Service(Fleet(setup, 2), traffic, found.watch, found.ended, keep=False)
    service.run()
    assert found.summary(service)["completed"] == 400
    assert service.came == 400
    assert not service.calls
    assert not any(worker.calls for worker in service.workers)
    assert len(service.router._order) < 100  # pyright: ignore[reportAttributeAccessIssue]
