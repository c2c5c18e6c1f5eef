"""Random fleets under random traffic with faults, each made of one number: what fails, fails again with that number.

The long form runs until a number of steps: `python -m tests.study.simulate.chaos --steps 1000000`. A failure names its
seed, and `--first SEED --seeds 1` runs it again.
"""

import hashlib
import random
import time
from collections import Counter
from dataclasses import dataclass

from tests.page_audit import leaked
from tests.seeds import outcomes
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.cost import CostModel
from twostroke.models.rope import Rope
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.simulate.engine_setup import EngineSetup
from twostroke.study.simulate.fleet import ROUTERS, Fleet, FleetFaults, KvLink
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.simulate.step_costs import MeasuredCosts
from twostroke.study.traffic.requests import ClosedLoop, PromptPiece, Traffic, TrafficRequest

LAYER = Layer(Attention(4, 2, 16, 1.0, Rope(10_000.0)), GatedMLP(96))
CONFIG = ModelConfig("tiny", 384, 64, 2048, 1e-6, (LAYER,) * 2, tied=True)
COST = CostModel(CONFIG, {"embed": 30_000, "layers.0.q": 5_000}, 256)
PRICES = (1e-7, 1e-8, 1e-7, 1e-11, 1e-11, 1e-11, 1e-10, 1e-10, 1e-10)
AUDIT_EVERY = 200  # events between two counts of all pages
MOST_EVENTS = 500_000  # of a run; more would be a livelock
EVENTS = ("preemption", "hit", "moved")  # that also have to happen in some run


@dataclass(frozen=True)
class Outcome:
    """A run that kept all rules. `trace` is a digest of when each token came."""

    steps: int
    trace: str
    happened: Counter[str]


def draw(seed: int) -> tuple[Fleet, Traffic]:
    """A fleet and its traffic."""
    rng = random.Random(f"fleet {seed}")
    page_size = rng.choice([4, 16])
    setup = EngineSetup(
        model=ModelSpec("tiny", CONFIG),
        costs=MeasuredCosts(StepPredictor(COST, PRICES), rng.choice([0.0, 1e-4]), rng.choice([0.0, 1e-5])),
        pages=rng.choice([24, 40, 100, 1000]) * 16 // page_size,
        page_size=page_size,
        index=rng.choice(["radix", "radix", "off"]),
        asynchronous=rng.random() < 0.5,
        scheduler=SchedulerConfig(rng.choice([16, 64, 512]), rng.choice([1, 4, 64]), rng.choice([None, None, 3.0])),
    )
    apart = rng.random() < 0.5
    sizes = (0, rng.randint(1, 3), rng.randint(1, 3)) if apart else (rng.randint(1, 4), 0, 0)
    faults = FleetFaults(
        life_s=rng.choice([None, 0.1, 0.5, 5.0]),
        down_s=rng.choice([0.0, 0.05, 1.0]),
        notice_s=rng.choice([0.0, 0.02, 0.5]),
        lost=rng.choice([0.0, 0.0, 0.3]),
        patience_s=0.2,
        until_s=rng.choice([0.5, 2.0]),
        seed=seed,
    )
    router = rng.choice(ROUTERS[: 2 if setup.index == "off" else 3])
    together, prefill, decode = sizes
    fleet = Fleet(setup, together, prefill, decode, router, KvLink(rng.choice([1e6, 1e8]), 1e-4), faults)
    return fleet, _traffic(rng, fleet.setup.max_tokens)


def _traffic(rng: random.Random, most: int) -> Traffic:
    now, arrivals = 0.0, list[TrafficRequest]()
    gap, groups, longest = rng.choice([0.0, 0.002, 0.02]), rng.randint(1, 6), min(most, rng.choice([60, 200, 380]))
    for number in range(rng.randint(5, 120)):
        now += rng.expovariate(1 / gap) if gap else 0.0
        output = rng.randint(1, max(1, longest // 4))
        shared = rng.choice([0, longest // 4, longest // 2])
        pieces = [PromptPiece(rng.randrange(groups), shared)] if shared else []
        own = rng.randint(1, max(1, longest - output - shared))
        arrivals.append(TrafficRequest(now, (*pieces, PromptPiece(1000 + number, own)), output))
    if rng.random() < 0.3:
        return Traffic.replayed(arrivals).in_closed_loop(ClosedLoop(rng.randint(1, 8)))
    return Traffic.replayed(arrivals)


def check(seed: int) -> Outcome:
    """Run one fleet to the end. Raises AssertionError if a token, a request or a page is missing or too many."""
    service = Simulation(*draw(seed))
    while service.left and service.events.step():
        assert service.events.count < MOST_EVENTS, "it does not come to an end"
        if not service.events.count % AUDIT_EVERY:
            assert not leaked(service), "pages that nobody holds"
            for index in [one.model.index for one in service.workers if one.model.index is not None]:
                unused = index.num_evictable
                assert (index.can_evict(unused), index.can_evict(unused + 1)) == (True, False)
    calls = service.calls
    assert len(calls) == len(service.traffic.arrivals)
    assert not service.left
    for call in calls:
        assert len(call.tokens) == call.asked.output_tokens
        assert call.tokens == sorted(call.tokens)
        assert call.tokens[0] >= call.arrival
    assert not leaked(service)
    assert not service.stranded
    for worker in service.workers:  # requests that go on elsewhere would keep their pages here
        worker.engine.close()
        assert not worker.pool.num_used
    happened = service.happened + Counter(
        preemption=sum(call.preemptions for call in calls),
        hit=sum(call.cached for call in calls),
        moved=service.transfers.moved_bytes,
    )
    trace = hashlib.blake2b(repr([call.tokens for call in calls]).encode(), digest_size=8).hexdigest()
    return Outcome(service.num_steps, trace, happened)


def main() -> None:
    about = __doc__.splitlines()[0] if __doc__ else None
    seeds, steps, happened, began = 0, 0, Counter[str](), time.perf_counter()
    for outcome in outcomes("tests.study.simulate.chaos", about, check):
        seeds, steps, happened = seeds + 1, steps + outcome.steps, happened + outcome.happened
    seconds = time.perf_counter() - began
    print(f"{seeds} seeds, {steps:,} steps in {seconds:.0f} s; {dict(happened)}")


if __name__ == "__main__":
    main()
