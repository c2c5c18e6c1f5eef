"""A simulated engine takes the decisions of a real one: every step, row, page, hit and preemption."""

# pyright: reportPrivateUsage=false

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.study.simulate.real import RealSetup
from tests.thinning import examples
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.engine.engine import Engine
from twostroke.engine.request import arrival_numbers
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.models.cost import CostModel
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.simulate.engine_setup import EngineSetup, HttpOverhead
from twostroke.study.simulate.fleet import Fleet, FleetFaults, KvLink
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.simulate.step_costs import MeasuredCosts
from twostroke.study.simulate.worker import SimulatedWorker
from twostroke.study.traffic.requests import ClosedLoop, PromptPiece, Replay, Traffic, TrafficRequest

PRICES = (1e-9, 5e-9, 2e-9, 3e-9, 2e-9, 1e-9, 4e-9, 1e-9, 5e-9)  # any that make steps of different lengths
LONGEST = 150  # tokens of a request
HOST_S = 1e-4  # of a step


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_model("llama", tmp_path_factory.mktemp("simulated"), head_dim=64, num_attention_heads=2)
    with LLM(str(directory), kv_bytes=1 << 20, threads=1) as opened:
        yield opened


class Log:
    """What every engine of a service decides, in order."""

    def __init__(self, service: Simulation) -> None:
        self.lines: list[Any] = []
        self._service = service
        self._first = next(arrival_numbers)
        begin = service.begin_worker

        def beginning(router: Any) -> None:
            begin(router)
            self.watch(service.workers[-1])

        service.begin_worker = beginning
        for worker in service.workers:
            self.watch(worker)

    def watch(self, worker: SimulatedWorker) -> None:
        engine, placement = worker.engine, worker.engine.placement
        place = placement.place

        def placing(planned: Any) -> Any:
            chunks, failed = place(planned)
            rows = [
                (self._number(one.choice.request), len(one.tokens), one.logit_rows, one.slot_mapping.rows.tolist())
                for one in chunks
            ]
            self.lines.append((worker.number, worker.clock.now, rows, len(failed), self.state(engine, worker)))
            return chunks, failed

        placement.place = placing

    def state(self, engine: Engine, worker: SimulatedWorker) -> tuple[Any, ...]:
        index, pool = worker.model.index, worker.pool
        known = None if index is None else (index.hit_tokens, index.queried_tokens, index.pages_in_pool().tolist())
        return engine.num_running, engine.num_waiting, engine.preemptions, pool.frames.free[-8:], pool.num_free, known

    def _number(self, request: Any) -> int:
        # By its order of arrival: a reference to a request would keep its pages.
        return request.arrival_order - self._first


def decisions(fleet: Fleet, traffic: Traffic) -> tuple[list[Any], list[Any]]:
    """Every step of every engine, and the fate of every call."""
    service = Simulation(fleet, traffic)
    log = Log(service)
    service.run()
    calls = [(one.tokens, one.scheduled, one.cached, one.entered, one.moves, one.preemptions) for one in service.calls]
    return log.lines, [
        *calls,
        sorted(service.happened.items()),
        service.transfers.moved_bytes,
        service.num_steps,
        service.stranded,
    ]


PIECES = st.tuples(st.integers(0, 3), st.sampled_from([1, 15, 16, 17, 40]))
REQUESTS = st.tuples(
    st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.3]),  # seconds after the request before
    st.lists(PIECES, min_size=1, max_size=3),
    st.sampled_from([1, 2, 9, 30]),
)
ENGINES = st.fixed_dictionaries(
    {
        "pages": st.sampled_from([10, 14, 40, 400]),
        "index": st.sampled_from(["radix", "off"]),
        "asynchronous": st.booleans(),
        "scheduler": st.builds(
            SchedulerConfig,
            max_step_tokens=st.sampled_from([1, 7, 50, 512]),
            max_running=st.sampled_from([1, 2, 256]),
            itl_ms=st.sampled_from([None, 2.0]),
        ),
    }
)
FLEETS = st.fixed_dictionaries(
    {
        "sizes": st.sampled_from([(1, 0, 0), (1, 0, 0), (3, 0, 0), (0, 1, 1), (0, 2, 2)]),
        "router": st.sampled_from(["round-robin", "least-loaded", "kv-aware"]),
        "life_s": st.sampled_from([None, None, 0.5]),
        "lost": st.sampled_from([0.0, 0.3]),
        "seed": st.integers(0, 99),
    }
)


def fleet_of(setup: EngineSetup, drawn: dict[str, Any]) -> Fleet:
    faults = FleetFaults(drawn["life_s"], 0.2, 0.05, drawn["lost"], 0.1, drawn["seed"])
    aware = drawn["router"] == "kv-aware" and setup.index == "off"
    router = "least-loaded" if aware else drawn["router"]
    together, prefill, decode = drawn["sizes"]
    return Fleet(setup, together, prefill, decode, router, KvLink(1e7, 1e-3), faults)


def traffic_of(drawn: list[Any], concurrency: int | None) -> Traffic:
    now, arrivals = 0.0, list[TrafficRequest]()
    for gap, pieces, output in drawn:
        now += 0.0 if concurrency else gap
        arrivals.append(TrafficRequest(now, tuple(PromptPiece(*piece) for piece in pieces), output))
    pattern = ClosedLoop(concurrency) if concurrency else Replay(tuple(one.at for one in arrivals))
    return Traffic(arrivals, pattern)


# A transfer frees pages of the sender, which is in the midst of a prompt.
@example(
    requests=[(0.0, [(0, 40)], 1), (0.0, [(0, 40)], 1)],
    concurrency=None,
    engine={
        "pages": 10,
        "index": "radix",
        "asynchronous": False,
        "scheduler": SchedulerConfig(max_step_tokens=1, max_running=2),
    },
    fleet={"sizes": (0, 1, 1), "router": "round-robin", "life_s": None, "lost": 0.0, "seed": 0},
    stalls=(),
    front=HttpOverhead(),
)
# The same, and what the sender's step in flight has ended keeps no page.
@example(
    requests=[(0.0, [(0, 15)], 1), (0.0, [(0, 1)], 1), (0.0, [(0, 1)], 1)],
    concurrency=None,
    engine={
        "pages": 10,
        "index": "radix",
        "asynchronous": True,
        "scheduler": SchedulerConfig(max_step_tokens=7, max_running=2),
    },
    fleet={"sizes": (0, 2, 2), "router": "round-robin", "life_s": None, "lost": 0.0, "seed": 0},
    stalls=(),
    front=HttpOverhead(),
)
@settings(max_examples=examples(15), deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    concurrency=st.sampled_from([None, None, 2]),
    engine=ENGINES,
    fleet=FLEETS,
    stalls=st.sampled_from([(), (0.0, 0.004, 0.0)]),
    front=st.sampled_from([HttpOverhead(), HttpOverhead(0.001, 1e-5, (0.0, 0.003, 0.0))]),
)
def test_any_schedule(
    llm: LLM,
    requests: list[Any],
    concurrency: int | None,
    engine: dict[str, Any],
    fleet: dict[str, Any],
    stalls: tuple[float, ...],
    front: HttpOverhead,
) -> None:
    """The real engine computes with a tiny model; both are driven by the same clock."""
    compare(llm, traffic_of(requests, concurrency), engine | {"http": front}, fleet, stalls)


@pytest.mark.parametrize("pages", [110, 150, 1000])  # one sequence has room, a few, or all with every snapshot
@pytest.mark.parametrize(("sizes", "budget"), [((1, 0, 0), 50), ((1, 0, 0), 512), ((0, 1, 1), 50)])
def test_snapshots_of_states(
    tmp_path_factory: pytest.TempPathFactory, pages: int, sizes: tuple[int, int, int], budget: int
) -> None:
    """A model with recurrent layers: hits end behind snapshots, which take pages and are evicted as others are."""
    requests = [(0.0, [(0, 70), (1, 30)], 30), (0.001, [(2, 65)], 9), (0.3, [(0, 70), (1, 30), (3, 20)], 40)]
    fleet = {"sizes": sizes, "router": "round-robin", "life_s": None, "lost": 0.0, "seed": 0}
    engine = {"pages": pages, "index": "radix", "scheduler": SchedulerConfig(max_step_tokens=budget)}
    with LLM(str(write_model("qwen3_5", tmp_path_factory.mktemp("hybrid"))), kv_bytes=1 << 24, threads=1) as hybrid:
        compare(hybrid, traffic_of([*requests, *requests], None), engine, fleet)


def compare(
    llm: LLM, traffic: Traffic, engine: dict[str, Any], fleet: dict[str, Any], stalls: tuple[float, ...] = ()
) -> None:
    """The same decisions on an engine that computes and on one that does not."""
    config = llm.config
    spec = ModelSpec("tiny", config)
    costs = MeasuredCosts(
        StepPredictor(CostModel(config, llm.model.cost.matrix_bytes, llm.pool.entry_bytes), PRICES), HOST_S, 1e-5
    )
    costs = replace(costs, stalls=stalls)
    simulated, real = EngineSetup(spec, costs, **engine), RealSetup(spec, costs, **engine, opened=llm.model)
    found = decisions(fleet_of(simulated, fleet), traffic)
    expected = decisions(fleet_of(real, fleet), traffic)
    assert found == expected
    assert found[0]
    assert found[1][-1] == 0, "pages of workers that died"


def test_a_difference_is_seen(llm: LLM) -> None:
    """The comparison above is one: another chunk makes another list of steps."""
    costs = MeasuredCosts(
        StepPredictor(CostModel(llm.config, llm.model.cost.matrix_bytes, llm.pool.entry_bytes), PRICES)
    )
    setup = EngineSetup(ModelSpec("tiny", llm.config), costs, 40)
    traffic = traffic_of([(0.0, [(0, 40)], 4)], None)
    other = replace(setup, scheduler=SchedulerConfig(max_step_tokens=8))
    assert decisions(Fleet(setup), traffic) != decisions(Fleet(other), traffic)
