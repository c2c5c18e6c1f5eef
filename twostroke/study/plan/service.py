"""What plans serve under a load: the simulator's answers."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np

from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.timings import percentile
from twostroke.errors import InvalidRequest
from twostroke.study.plan.capacity import in_flight
from twostroke.study.plan.plan import Plan, RequestProfile
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.techniques import PLAIN, RepeatedPrompt, Technique
from twostroke.study.simulate.fleet import Fleet, KvLink
from twostroke.study.simulate.machine_setup import roofline_setup
from twostroke.study.simulate.simulation import BegunRequest
from twostroke.study.simulate.trial import Trial, try_load
from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop, Replay
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic, TrafficRequest
from twostroke.study.traffic.workload_sampler import WorkloadSampler

DRAWN = 4000  # requests that are drawn, of which trials take parts
ANSWER_TOKENS = 6400  # that a trial makes: 0.3 s of one core
MIN_REQUESTS, MAX_REQUESTS = 24, 100
SEEDS = 3  # trials whose spread tells how sure a percentile is
TOLERANCE = 1.12  # ratio of rates at which a search for the highest one ends
FLOOR = 0.3  # part of the highest rate below which no rate within the objectives is searched for
SEED = 1


def drawn_traffic(
    load: RequestProfile, rate: float | None, users: int | None, burstiness: float, sharegpt: bool
) -> Traffic:
    """Requests of a plan's workload, or of ShareGPT's lengths, at a rate or by a number of users."""
    own = TokenRange(load.prompt - load.shared, load.prompt - load.shared)
    lengths = (None, None) if sharegpt else (own, TokenRange(load.output, load.output))
    pattern = OpenLoop(rate or 1.0, burstiness) if users is None else ClosedLoop(users)
    return WorkloadSampler(DRAWN, *lengths, prefix_tokens=load.shared, seed=SEED).traffic(pattern)


def mean_profile(traffic: Traffic, ttft_ms: float | None, itl_ms: float | None) -> RequestProfile:
    """A plan's workload of mean lengths."""
    prompt, shared = ceil(float(np.mean(traffic.prompts))), int(np.mean(traffic.shared))
    return RequestProfile(prompt, ceil(float(np.mean(traffic.outputs))), 1, min(shared, prompt - 1), ttft_ms, itl_ms)


def require_positions(model: ModelSpec, traffic: Traffic, technique: Technique = PLAIN) -> None:
    """Raises InvalidRequest if a request has more tokens than the model has positions."""
    times = technique.times if isinstance(technique, RepeatedPrompt) else 1
    longest = int(np.max(times * traffic.prompts + traffic.outputs))
    if longest > model.max_position:
        raise InvalidRequest(
            f"the longest request has {longest} tokens; {model.name} has {model.max_position} positions"
        )


def require_load(model: ModelSpec, traffic: Traffic, technique: Technique = PLAIN) -> None:
    """Raises InvalidRequest if a load cannot be planned: a request exceeds the model's positions, the rate is unknown,
    or guesses would come from texts."""
    if technique.method.get("draft") == "lookup":
        raise InvalidRequest("prompt lookup cannot be simulated: its guesses come from texts. Leave out --method")
    require_positions(model, traffic, technique)
    if traffic.concurrency is None and traffic.rate is None:
        raise InvalidRequest("all requests of this trace come at once: say how many come a second with --rate")


@dataclass(frozen=True)
class Service:
    """What a plan serves. Rates are requests a second of all its workers together.

    Attributes:
        trials: at the rate that was asked for, with other requests each; empty if no sequence has room.
        highest: the highest rate at all; None for a number of users.
        within: the highest rate within the objectives, 0 for less than `FLOOR` of the highest; None for users.
    """

    plan: Plan
    rate: float | None
    trials: tuple[Trial, ...]
    highest: float | None
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
        """A percentile of the seconds of "ttft" or "gaps", of all trials together."""
        return percentile(self._all(name), percent) or 0.0

    def spread(self, name: str, percent: float) -> tuple[float, float]:
        """The least and the largest of that percentile over the trials, each by itself."""
        found = [trial.at(getattr(trial, name), percent) or 0.0 for trial in self.trials]
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

    A fleet of equal workers is one of them with its part of the requests, at random times: a router that knows loads
    does no worse. Workers of one stroke are simulated together.
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
        if plan.memory.users < 1:
            zero = None if self.rate is None else 0.0
            return Service(plan, self.rate, (), zero, zero)
        trials = tuple(self._trial(plan, self.rate, seed) for seed in range(seeds))
        if self.rate is None:
            return Service(plan, None, trials, None, None)
        return Service(plan, self.rate, trials, self.highest(plan), self.within(plan))

    def at(self, plan: Plan, rate: float) -> Service:
        """What a plan does at another rate, in one trial."""
        return Service(plan, rate, (self._trial(plan, rate, 0),), None, None)

    def of_users(self, users: int) -> "LoadSimulator":
        """The same requests of another number of users."""
        return LoadSimulator(self.traffic.in_closed_loop(ClosedLoop(users)), self.objectives)

    def enough(self, plan: Plan, rate: float | None, seeds: int = 1) -> bool:
        """Whether a plan keeps the objectives at a rate, or with the load's users, in each of so many trials."""
        if plan.memory.users < 1 or not self._alone(plan):
            return False
        if rate is not None and not self.objectives.given:
            return rate <= self.highest(plan)
        return not any(self._trial(plan, rate, seed).missed for seed in range(seeds))

    def highest(self, plan: Plan) -> float:
        """The highest rate that a plan serves at all: what it serves if requests never lack."""
        if plan.memory.users < 1:
            return 0.0
        return self._once((*_key(plan), "highest"), lambda: self._part(plan) * self._full(plan).first_token_rate)

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

    def range_of(self, service: Service) -> list[float]:
        """Its highest rate within the objectives if the machine's products reach the least and the most that engines
        do of the peak: scaled as the highest rate of all. Empty where the fraction is known."""
        plan, within, highest = service.plan, service.within, service.highest
        if not within or not highest:
            return []
        others = [replace(plan, machine=one) for one in plan.machine.efficiencies]
        return [within * self.highest(one) / highest for one in others]

    def _alone(self, plan: Plan) -> bool:
        """Whether a request keeps the objectives where no other is."""
        ttft, itl = self.objectives.ttft_s, self.objectives.itl_s
        return (ttft is None or plan.prefill.seconds <= ttft) and (itl is None or plan.decode(1).seconds <= itl)

    def _part(self, plan: Plan) -> int:
        """How many parts the requests have, of which one is simulated."""
        return 1 if plan.prefill_workers else plan.workers

    def _full(self, plan: Plan) -> Trial:
        return self._trial(plan, math.inf, 0)

    def _trial(self, plan: Plan, rate: float | None, seed: int) -> Trial:
        """`rate` is that of all workers; infinite for requests that all wait from the start, None for users."""
        return self._once((*_key(plan), rate, seed), lambda: self._run(plan, rate, seed))

    def _run(self, plan: Plan, rate: float | None, seed: int) -> Trial:
        objectives = Objectives() if rate == math.inf else self.objectives
        traffic = self._requests(rate, self._part(plan), seed)
        self.requests += len(traffic.arrivals)
        return try_load(fleet_of(plan), traffic, objectives, self._begun(plan, rate, seed))

    def _requests(self, rate: float | None, part: int, seed: int) -> Traffic:
        asked = self.traffic
        count = round(ANSWER_TOKENS / float(np.mean(asked.outputs)))
        count = min(max(MIN_REQUESTS, min(MAX_REQUESTS, count)), len(asked.arrivals))
        first = seed * count % len(asked.arrivals)
        picked = [*asked.arrivals[first:], *asked.arrivals[:first]]
        if rate is None:
            users = ceil((asked.concurrency or 1) / part)
            return Traffic(picked[: count + users], ClosedLoop(users), SEED)
        if rate == math.inf:
            return Traffic([replace(one, at=0.0) for one in picked[:count]], Replay((0.0,) * count), SEED)
        if isinstance(asked.pattern, OpenLoop):
            pattern = replace(asked.pattern, rate=rate / part)
            times = pattern.times(count, SEED + seed)
        else:  # a trace keeps its bursts: every part-th request, at its own time
            picked = list(asked.arrivals[seed % part :: part])
            scale = (asked.rate or rate) / rate
            times = [scale * (one.at - picked[0].at) for one in picked[:count]]
            pattern = Replay(tuple(times))
        return Traffic([replace(one, at=at) for one, at in zip(picked, times, strict=False)], pattern, SEED)

    def _begun(self, plan: Plan, rate: float | None, seed: int) -> list[BegunRequest]:
        """Requests that are under way in a steady state, at random places of their answers."""
        if plan.technique.method or isinstance(self.traffic.pattern, Replay):
            return []
        if rate is None:
            count = min(ceil((self.traffic.concurrency or 1) / self._part(plan)), plan.memory.users) - 1
        else:
            decoders = plan.workers - plan.prefill_workers if plan.prefill_workers else 1
            count = decoders * in_flight(plan, min(rate, 1e9))
        luck = random.Random(seed)
        asked: list[TrafficRequest] = [one for one in self.traffic.arrivals[-count:] if one.output_tokens > 1]
        return [BegunRequest(one, luck.randrange(1, one.output_tokens)) for one in asked] if count > 0 else []

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def peak_sequences(plan: Plan, load: LoadSimulator) -> int:
    """Sequences that a worker decodes or prefills at once, a bound that is rarely exceeded: three deviations of a
    Poisson number above the mean, and the one that is prefilled."""
    mean = load.served(plan, 1).sequences / plan.workers
    return max(1, min(plan.memory.users, ceil(mean + 3 * mean**0.5) + 1))


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


def _key(plan: Plan) -> tuple[Any, ...]:
    """What is simulated of a plan."""
    return (
        plan.weights.name, plan.model.kv_value_bytes, plan.tp, plan.workers, plan.prefill_workers, plan.budget,
        plan.max_running, plan.technique.name, plan.machine.compute,
    )  # fmt: skip
