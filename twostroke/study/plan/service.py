"""What plans serve under a load: the simulator's answers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.timings import percentile
from twostroke.study.plan.capacity import WorkerPace, in_flight, pace
from twostroke.study.plan.loads import SEED, BusyStretch, busy_stretch, part_at_rate, part_of, some_of, times_at_rate
from twostroke.study.plan.plan import Plan
from twostroke.study.simulate.engine_setup import roofline_setup
from twostroke.study.simulate.fleet import Fleet, KvLink
from twostroke.study.simulate.simulation import BegunRequest
from twostroke.study.simulate.trial import Trial, try_load
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import ClosedLoop, Replay, Traffic, TrafficRequest

SEEDS = 3  # draws of requests whose spread tells how sure a percentile is
TOLERANCE = 1.12  # ratio of rates at which a search for the highest one ends
FAR = 3.0  # objectives beyond which a wait is that of the arithmetic
FLOOR = 0.3  # part of the highest rate below which no rate within the objectives is searched for


@dataclass(frozen=True)
class Service:
    """What a plan serves. Rates are requests a second of all its workers together."""

    plan: Plan
    rate: float | None
    trials: tuple[Trial, ...]  # at the rate that was asked for, with other requests each; empty if no sequence has room
    # seconds of the objectives' percentile of TTFT, each from another busy stretch; empty for users, and for a rate
    # that cannot be served
    tails: tuple[float, ...]
    highest: float | None  # the highest rate at all; None for a number of users
    # the highest rate within the objectives, 0 for less than `FLOOR` of the highest; None for users
    within: float | None

    @property
    def verdict(self) -> str:
        """ "does not fit", "cannot be served", "misses the objective" or "nothing to do"."""
        if not self.trials:
            return "does not fit"
        if self.rate is not None and self.highest is not None and self.rate > self.highest:
            return "cannot be served"
        return "misses the objective" if self.missed else "nothing to do"

    @cached_property
    def missed(self) -> list[str]:
        """Objectives that are missed: "TTFT", "ITL"."""
        if not self.trials:
            return []
        objectives = self.trials[0].objectives
        limits = (("TTFT", "ttft", objectives.ttft_s), ("ITL", "gaps", objectives.itl_s))
        return [
            name for name, values, limit in limits if limit is not None and self.at(values, objectives.percent) > limit
        ]

    def _all(self, name: str) -> list[float]:
        return [value for trial in self.trials for value in getattr(trial, name)]

    def at(self, name: str, percent: float) -> float:
        """A percentile of the seconds of "ttft" or "gaps", of all trials together. Of TTFT, that of the objectives is
        the worst draw's: one draw of thousands of requests may wait twice as long as another."""
        if name == "ttft" and self.tails and percent == self.trials[0].objectives.percent:
            return max(self.tails)
        return percentile(self._all(name), percent) or 0.0

    def spread(self, name: str, percent: float) -> tuple[float, float]:
        """The least and the largest of that percentile over the trials, each by itself."""
        found = [trial.at(getattr(trial, name), percent) or 0.0 for trial in self.trials]
        found = list(self.tails) if name == "ttft" and self.tails else found
        return min(found), max(found)

    def mean(self, name: str) -> float:
        """Mean seconds of "ttft" or "gaps" over all trials."""
        return float(np.mean(self._all(name) or [0.0]))

    @property
    def sequences(self) -> float:
        """Sequences that decode at once, on average, of all workers."""
        part = self.plan.workers if not self.plan.prefill_workers else 1
        return part * float(np.mean([trial.sequences for trial in self.trials])) if self.trials else 0.0

    @property
    def binds(self) -> dict[str, str]:
        """What binds TTFT and ITL: "queueing", where more than half of TTFT is not the prompt's own prefill;
        "interference", where more than half of a gap is not its decode step; else "compute", "bandwidth" or "link".
        What binds "rate": "memory", where as many sequences decode as have room; else the stroke that takes longer."""
        plan = self.plan
        if not self.trials:
            return {"memory": "memory"}
        percent, prefill = self.trials[0].objectives.percent, plan.prefill
        decode = plan.decode(max(1, round(self.sequences / plan.workers)))
        busy = plan.workload.output * decode.seconds * plan.workers / max(1.0, self.sequences)
        full = self.sequences >= 0.9 * plan.workers * plan.memory.users
        return {
            "rate": "memory" if full else (prefill if prefill.seconds > busy else decode).bound,
            "TTFT": "queueing" if self.at("ttft", percent) > 2 * prefill.seconds else prefill.bound,
            "ITL": "interference" if self.at("gaps", percent) > 2 * decode.seconds else decode.bound,
        }


@dataclass
class LoadSimulator:
    """Simulates plans under one load, and keeps each answer.

    A fleet of equal workers is one of them with its part of the requests, in turn: a router that knows loads does no
    worse. Workers of one stroke are simulated together.
    """

    traffic: Traffic
    objectives: Objectives
    requests: int = 0  # simulated so far
    _kept: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any])

    @property
    def rate(self) -> float | None:
        """Requests a second; None for a fixed number of users."""
        return None if self.traffic.concurrency is not None else self.traffic.rate

    def served(self, plan: Plan, seeds: int = SEEDS) -> Service:
        """All of what a plan serves."""
        rate = self.rate
        if plan.memory.users < 1:
            zero = None if rate is None else 0.0
            return Service(plan, rate, (), (), zero, zero)
        if rate is None:
            return Service(plan, None, tuple(self._trial(plan, None, seed) for seed in range(seeds)), (), None, None)
        return replace(self.at(plan, rate, seeds), highest=self.highest(plan), within=self.within(plan))

    def at(self, plan: Plan, rate: float, seeds: int = 1) -> Service:
        """What a plan does at another rate."""
        lost = rate >= self.highest(plan)
        tails = () if lost else tuple(self._tail(plan, rate, seed)[0] for seed in self._draws(plan, rate, seeds))
        return Service(plan, rate, (self._trial(plan, rate, 0),), tails, None, None)

    def enough(self, plan: Plan, rate: float | None, seeds: int = 1) -> bool:
        """Whether a plan keeps the objectives at a rate, or with the load's users, with each of so many draws."""
        if plan.memory.users < 1 or not self._alone(plan):
            return False
        if rate is None:
            return not any(self._trial(plan, None, seed).missed for seed in range(seeds))
        kept = all(self._kept_within(plan, rate, seed) for seed in self._draws(plan, rate, seeds))
        return kept and rate < self.highest(plan)

    def _kept_within(self, plan: Plan, rate: float, seed: int) -> bool:
        limits = self.objectives
        if limits.ttft_s is None:
            return limits.itl_s is None or not self._trial(plan, rate, seed).missed
        ttft, trial = self._tail(plan, rate, seed)
        gap = 0.0 if trial is None else trial.at(trial.gaps) or 0.0
        return ttft <= limits.ttft_s and (limits.itl_s is None or gap <= limits.itl_s)

    def highest(self, plan: Plan) -> float:
        """The highest rate that a plan serves at all: what it serves if requests never lack."""
        if plan.memory.users < 1:
            return 0.0
        one, part = replace(plan, workers=plan.workers // self._part(plan)), self._part(plan)  # all alike, or together
        return part * self._once((*_key(one), "highest"), lambda: self._saturated(one))

    def _saturated(self, plan: Plan) -> float:
        """Requests a second whose first token comes, or whose tokens are made, whichever is less: the first counts
        what begins, the second what ends."""
        trial = self._trial(plan, math.inf, 0)
        made = float(np.mean(self.traffic.outputs)) - 1
        return min(trial.first_token_rate, trial.token_rate / made if made > 0 else math.inf)

    def within(self, plan: Plan) -> float:
        """The highest rate within the objectives, by trials at rates below the highest one."""
        if plan.memory.users < 1 or not self._alone(plan):
            return 0.0
        return self._once((*_key(plan), "within"), lambda: self._search(plan))

    def known_within(self, plan: Plan) -> float | None:
        """The same if it was simulated already."""
        return self._kept.get((*_key(plan), "within"))

    def _search(self, plan: Plan) -> float:
        low, high, floor = 0.0, self.highest(plan), FLOOR * self.highest(plan)
        if not self.objectives.given:
            return high
        if (asked := self.rate) is not None and asked < high:  # which the plan was tried at, whatever is sought
            low, high = (asked, high) if self.enough(plan, asked) else (low, asked)
        rate = max(0.88 * high, math.sqrt(low * high))
        while high > TOLERANCE * low and high > floor:
            low, high = (rate, high) if self.enough(plan, rate) else (low, rate)
            rate = math.sqrt(low * high) if low else high / 2
        return low

    def _alone(self, plan: Plan) -> bool:
        """Whether a request keeps the objectives where no other is."""
        ttft, itl = self.objectives.ttft_s, self.objectives.itl_s
        return (ttft is None or plan.prefill.seconds <= ttft) and (itl is None or plan.decode(1).seconds <= itl)

    def _part(self, plan: Plan) -> int:
        """How many parts the requests have, of which one is simulated."""
        return 1 if plan.prefill_workers else plan.workers

    def _trial(self, plan: Plan, rate: float | None, seed: int) -> Trial:
        """`rate` is that of all workers; infinite for requests that all wait from the start, None for users."""

        def run() -> Trial:
            objectives = Objectives() if rate == math.inf else self.objectives
            return self._run(plan, self._some(plan, rate, seed), objectives, self._begun(plan, rate, seed))

        return self._once((*_key(plan), rate, seed), run)

    def _tail(self, plan: Plan, rate: float, seed: int) -> tuple[float, Trial | None]:
        """Seconds of the objectives' percentile of TTFT at a rate below the highest, and the trial that told it; None
        where arithmetic told it."""

        def run() -> tuple[float, Trial | None]:
            stretch = self._stretch(plan, rate, seed)
            if stretch.wait > FAR * (self.objectives.ttft_s or math.inf):
                return stretch.wait, None
            sought = Objectives(percent=self.objectives.percent)
            trial = self._run(plan, stretch.traffic, sought, _spread(plan, stretch.begun, seed))
            return trial.ttft[-1] if len(trial.ttft) == len(stretch.traffic.arrivals) else math.inf, trial

        return self._once((*_key(plan), rate, seed, "tail"), run)

    def _stretch(self, plan: Plan, rate: float, seed: int) -> BusyStretch:
        part, percent = self._part(plan), self.objectives.percent

        def find() -> BusyStretch:
            some = part_of(self.traffic, part, seed)
            times = times_at_rate(self.traffic, some, rate, part, seed)
            return busy_stretch(some, times, self._pace(plan), rate / part, percent)

        return self._once((*_key(plan), rate, seed, "stretch"), find)

    def _pace(self, plan: Plan) -> WorkerPace:
        return self._once((*_key(plan), "pace"), lambda: pace(plan))

    def _draws(self, plan: Plan, rate: float, count: int) -> Sequence[int]:
        """Seeds of the stretches that are simulated: those whose requests wait longest first."""
        return sorted(range(SEEDS), key=lambda seed: -self._stretch(plan, rate, seed).wait)[:count]

    def _run(self, plan: Plan, traffic: Traffic, objectives: Objectives, begun: Sequence[BegunRequest]) -> Trial:
        self.requests += len(traffic.arrivals)
        return try_load(fleet_of(plan), traffic, objectives, begun)

    def _some(self, plan: Plan, rate: float | None, seed: int) -> Traffic:
        """A few typical requests."""
        picked, part = some_of(self.traffic, seed), self._part(plan)
        if rate is None:
            users = math.ceil((self.traffic.concurrency or 1) / part)
            return Traffic([*picked, *picked[:users]], ClosedLoop(users), SEED)
        if rate == math.inf:
            return Traffic.replayed([replace(one, at=0.0) for one in picked], SEED)
        some = part_at_rate(self.traffic, rate, part, seed, len(picked))
        return Traffic.replayed(some, SEED)

    def _begun(self, plan: Plan, rate: float | None, seed: int) -> list[BegunRequest]:
        """Requests that are under way in a steady state."""
        if isinstance(self.traffic.pattern, Replay):
            return []
        if rate is None:
            count = min(math.ceil((self.traffic.concurrency or 1) / self._part(plan)), plan.memory.users) - 1
        else:
            decoders = plan.workers - plan.prefill_workers if plan.prefill_workers else 1
            count = decoders * in_flight(plan, self._pace(plan), min(rate, 1e9))
        return _spread(plan, self.traffic.arrivals[-count:] if count > 0 else [], seed)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def peak_sequences(plan: Plan, load: LoadSimulator) -> int:
    """Sequences that a worker decodes or prefills at once, a bound that is rarely exceeded: three deviations of a
    Poisson number above the mean, and the one that is prefilled."""
    mean = load.served(plan, 1).sequences / plan.workers
    return max(1, min(plan.memory.users, math.ceil(mean + 3 * mean**0.5) + 1))


def fleet_of(plan: Plan) -> Fleet:
    """One of a plan's equal workers, or all of them if they do one stroke each."""
    scheduler = SchedulerConfig(plan.budget, plan.max_running)
    setup = roofline_setup(plan.roofline, plan.technique, scheduler=scheduler)
    if not plan.prefill_workers:
        return Fleet(setup)
    machine = plan.machine
    rate = machine.link if machine.link is not None else machine.host
    assert rate is not None
    link = KvLink(plan.tp * rate * machine.link_share)
    return Fleet(setup, 0, plan.prefill_workers, plan.workers - plan.prefill_workers, link=link)


def _spread(plan: Plan, asked: Sequence[TrafficRequest], seed: int) -> list[BegunRequest]:
    """Requests under way at places of their answers that are spread evenly; none of a technique's."""
    places = [((i + 0.5) / len(asked) + seed / SEEDS) % 1 for i in range(len(asked))]
    made = [1 + int(at * (one.output_tokens - 1)) for one, at in zip(asked, places, strict=True)]
    begun = [BegunRequest(one, by) for one, by in zip(asked, made, strict=True) if by < one.output_tokens]
    return [] if plan.technique.method else begun


def _key(plan: Plan) -> tuple[Any, ...]:
    """What is simulated of a plan."""
    return (
        plan.weights.name, plan.model.kv_bits, plan.tp, plan.workers, plan.prefill_workers, plan.budget,
        plan.max_running, plan.technique.name, plan.machine.compute,
    )  # fmt: skip
