"""The whole space of configurations, and the cheapest of them that keeps the objectives.

Price: devices first, then how much a change asks (`Change.asks`). Watts and money are devices times a constant.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, log

from twostroke.study.plan.capacity import capacity, tuned
from twostroke.study.plan.plan import BUDGET, Plan
from twostroke.study.plan.service import LoadSimulator, Service
from twostroke.study.roofline.techniques import Technique
from twostroke.study.roofline.weight_formats import FORMATS

DEGREES = (1, 2, 4, 8, 16)
ENGINE_FORMATS = ("bf16", "int8-w8a8", "int4-w4a8")  # what this engine has
NOTHING, SAME_ANSWERS, CLOSE, FEWER_BITS, OTHER_ANSWERS, OTHER_REQUESTS = range(6)  # what a change asks
TRIES = 4  # candidates of a way out that are simulated
MAX_DEVICES = 1 << 20
TWICE = 2  # with two draws of requests
HOPE = 0.85  # part of a rate that a candidate must promise to be simulated
MIN_GAIN = 1.1  # times as much must be promised by workers of one stroke, or by a technique


@dataclass(frozen=True)
class ChangeLimits:
    """What may be changed.

    Attributes:
        tp: maximum devices for tensor parallelism.
        formats: formats that weights may be in.
        techniques: by the names of `--method`.
        apart: whether prefill and decode may have workers of their own.
    """

    tp: int
    formats: tuple[str, ...]
    techniques: Mapping[str, Technique]
    apart: bool = True


@dataclass(frozen=True)
class Change:
    """One dimension of a configuration that differs from what was asked.

    Attributes:
        needs: its condition, in a few words.
        asks: what it asks of quality or of users, from `NOTHING` to `OTHER_REQUESTS`.
    """

    name: str
    needs: str
    asks: int


@dataclass(frozen=True)
class PlanCandidate:
    """A configuration, and in what it differs from the one that was asked for."""

    plan: Plan
    changes: tuple[Change, ...] = ()

    @property
    def asks(self) -> int:
        """The most that one of its changes asks, then their sum: less is milder."""
        return 100 * max((one.asks for one in self.changes), default=0) + sum(one.asks for one in self.changes)

    def __add__(self, other: "PlanCandidate") -> "PlanCandidate":
        """The other's configuration, with the changes of both."""
        return PlanCandidate(other.plan, (*self.changes, *other.changes))


def changes_alone(plan: Plan, limits: ChangeLimits) -> list[PlanCandidate]:
    """Every change of one dimension."""
    dimensions = (_formats, _kv_bits, _degrees, _techniques, _requests)
    return [one for dimension in dimensions for one in dimension(plan, limits) if one.changes]


def _space(plan: Plan, limits: ChangeLimits) -> list[PlanCandidate]:
    """All combinations of a worker's dimensions. Without a change first."""
    found = [PlanCandidate(replace(plan, workers=1, prefill_workers=0))]
    for dimension in (_formats, _kv_bits, _degrees, _techniques):
        found = [one + change for one in found for change in dimension(one.plan, limits)]
    return found


def _formats(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Weights of fewer bytes whose products this machine has."""
    yield PlanCandidate(plan)
    size = plan.weights.total(plan.model)
    for name in limits.formats:
        form = FORMATS[name]
        has = form.arithmetic[0] in plan.machine.flops and (name != "mxfp4-w4a16" or plan.model.weights == name)
        if has and form.total(plan.model) < 0.95 * size:
            asks = CLOSE if form.layer >= 1 else FEWER_BITS
            yield PlanCandidate(
                replace(plan, weights=form), (Change(form.title(plan.machine), "check the answers", asks),)
            )


def _kv_bits(plan: Plan, _: ChangeLimits) -> Iterator[PlanCandidate]:
    yield PlanCandidate(plan)
    if plan.model.kv_bits > 8:
        less = replace(plan, model=plan.model.with_kv_bits(8))
        yield PlanCandidate(less, (Change("KV in 8 bits", "check the answers", CLOSE),))


def _degrees(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Divide each product among more devices, or among fewer."""
    yield PlanCandidate(plan)
    for tp in DEGREES:
        linked = tp == 1 or not plan.machine.unknown_link
        if tp != plan.tp and tp <= max(limits.tp, plan.tp) and linked and plan.model.divides(tp):
            name = f"tensor parallelism of {tp}" if tp > 1 else "no tensor parallelism"
            needs = _devices(tp - plan.tp)
            yield PlanCandidate(replace(plan, tp=tp), (Change(name, needs, NOTHING),))


def _techniques(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Guesses, students, PTDO for repetition, dropping and compression."""
    yield PlanCandidate(plan)
    known = limits.techniques
    wanted: dict[str, tuple[str, int]] = {}
    if plan.technique == known.get("repeat"):
        wanted = {"ptdo": ("decodes from the last copy", CLOSE)}
    elif not plan.technique.method:
        guesses = ("lookup", "speculative-draft", "speculative-student")
        wanted = {name: (f"if {known[name].assumed}", SAME_ANSWERS) for name in guesses if name in known}
        wanted |= dict.fromkeys(("refresh", "overfill"), ("a student answers", OTHER_ANSWERS))
        if plan.workload.prompt > known["drop"].kept(plan.workload.prompt):
            wanted["drop"] = "forgets the middle", OTHER_ANSWERS
        wanted |= {name: ("half of the tokens are gone", OTHER_ANSWERS) for name in ("compress",) if name in known}
    for name, (needs, asks) in wanted.items():
        yield PlanCandidate(replace(plan, technique=known[name]), (Change(known[name].name, needs, asks),))


def _requests(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Other requests: prompts that begin alike, fewer sequences at once, shorter prompts."""
    load = plan.workload

    def other(name: str, needs: str, **changed: int) -> PlanCandidate:
        made = replace(plan, workload=replace(load, **changed))
        return PlanCandidate(made, (Change(name, needs, OTHER_REQUESTS),))

    if load.shared < load.prompt // 2:
        yield other("prefix caching of half of the prompt", "if half is the same for all", shared=load.prompt // 2)
    if load.concurrency > 1:
        yield other(f"{load.concurrency // 2} at once", "others wait", concurrency=load.concurrency // 2)
    if load.prompt > 1:
        yield other(
            "prompts of half the length", "other prompts", prompt=ceil(load.prompt / 2), shared=load.shared // 2
        )


def _devices(more: int) -> str:
    return f"{abs(more)} {'more' if more > 0 else 'fewer'} device{'s' if abs(more) > 1 else ''}"


@dataclass(frozen=True)
class WayOut:
    """A configuration that is advised, and what it serves; without a load no service."""

    candidate: PlanCandidate
    service: Service | None = None

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def enough(self) -> bool:
        """Whether it keeps the objectives at what was asked."""
        service = self.service
        if service is None:
            return self.plan.verdict == "nothing to do"
        return service.verdict == "nothing to do"


@dataclass(frozen=True)
class Advice:
    """What was asked for, and ways out.

    Attributes:
        same: the mildest change without more devices, or what serves most with them; None if nothing helps.
        more: the fewest more devices with the same answers, or with others if these are not enough.
        cheapest: the fewest devices of all that are enough, with answers to be checked at most, where these are fewer
            than what was asked for or is advised; None if nothing does with fewer.
        frontier: devices and rate within the objectives of what was simulated, each better than all with fewer devices.
    """

    asked: WayOut
    same: WayOut | None = None
    more: WayOut | None = None
    cheapest: WayOut | None = None
    frontier: tuple[tuple[int, float, str], ...] = ()

    @property
    def best(self) -> WayOut:
        """What is advised: the first of these that is enough, or else what serves most without more devices."""
        ways = [way for way in (self.asked, self.same, self.cheapest, self.more) if way is not None]
        return next((way for way in ways if way.enough), self.same or self.asked)


def advise(plan: Plan, limits: ChangeLimits) -> Advice:
    """Search without a load: nobody waits for anybody else."""
    asked = WayOut(PlanCandidate(plan))
    space = [one for one in _space(plan, limits) if one.plan.verdict == "nothing to do"]
    other = [one for one in _requests(plan, limits) if one.plan.verdict == "nothing to do"]
    ranked = sorted(space, key=lambda one: (one.asks, one.plan.devices, one.plan.ttft_ms))
    same = next((one for one in (*ranked, *other) if one.plan.devices <= plan.devices), None)
    by_devices = sorted(ranked, key=lambda one: (one.asks > SAME_ANSWERS * 101, one.plan.devices))
    more = next((one for one in by_devices if one.plan.devices > plan.devices), None)
    if asked.enough:
        same = more = None
    fewest = min(space, key=lambda one: (one.plan.devices, one.asks), default=asked.candidate)
    cheaper = fewest.plan.devices < (same or more or asked.candidate).plan.devices
    ways = [None if one is None else WayOut(one) for one in (same, more, fewest if cheaper else None)]
    return Advice(asked, ways[0], ways[1], ways[2])


class LoadSearch:
    """The search under a load. Arithmetic orders the candidates, and the simulator judges them."""

    def __init__(self, plan: Plan, limits: ChangeLimits, load: LoadSimulator) -> None:
        self.plan, self.limits, self.load = plan, limits, load
        self.asked = WayOut(PlanCandidate(plan), load.served(plan))
        self._tried: list[PlanCandidate] = []
        self._promised: dict[int, tuple[PlanCandidate, float]] = {}
        promised, found = capacity(plan), self.asked.service
        within = None if found is None else found.within
        # By how much the arithmetic is too optimistic for these objectives.
        self._true = min(1.0, max(0.3, within / promised)) if within and promised else 0.9

    def advice(self) -> Advice:
        enough = self.asked.enough
        space = [one for one in _space(self.plan, self.limits) if one.plan.memory.users > 0]
        units = [self._unit(one) for one in space if one.plan.technique.method.get("draft") != "lookup"]
        same = None if enough else self._same(units)
        more = None if enough else self._more(units)
        best = self.asked if enough else same if same is not None and same.enough else more
        cheapest = None
        if self.load.rate is not None and self.load.objectives.given and best is not None:
            milder = [one for one in units if one.asks < 100 * OTHER_ANSWERS]
            cheapest = self._fewest(milder, 0, best.plan.devices, TWICE)
        return Advice(self.asked, same, more, cheapest, self._frontier())

    def _unit(self, one: PlanCandidate) -> PlanCandidate:
        """With the best steps for it."""
        plan = tuned(one.plan)
        steps = Change(f"steps of {plan.budget:,} tokens", "", NOTHING)
        return PlanCandidate(plan, one.changes if plan.budget == BUDGET else (*one.changes, steps))

    def _fleet(self, unit: PlanCandidate, workers: int) -> PlanCandidate:
        if workers == 1:
            return unit
        many = Change(f"{workers:,} workers of {unit.plan.tp} device{'s' if unit.plan.tp > 1 else ''}", "", NOTHING)
        return PlanCandidate(replace(unit.plan, workers=workers), (*unit.changes, many))

    def _promise(self, one: PlanCandidate) -> float:
        if id(one) not in self._promised:
            self._promised[id(one)] = one, capacity(one.plan)
        return self._true * self._promised[id(one)][1]

    def _rank(self, one: PlanCandidate) -> int:
        """Less promises more; rates that differ by less than a twentieth are alike, and the earlier format comes."""
        promise = self._promise(one)
        return -round(log(promise) / log(1.05)) if promise > 0 else 1 << 30

    def _same(self, units: list[PlanCandidate]) -> WayOut | None:
        """With as many devices: the mildest that is enough, or else what serves most."""
        devices = self.plan.devices
        fleets = [self._fleet(one, devices // one.plan.tp) for one in units if one.plan.tp <= devices]
        fleets += [apart for one in fleets for apart in self._apart(one)]
        rate = self.load.rate
        wanted = 0.0 if rate is None else HOPE * rate
        promising = [one for one in fleets if self._promise(one) >= wanted and one.plan != self.plan]
        order = sorted(promising, key=lambda one: (one.asks, len(one.changes), self._rank(one)))
        order = [one for _, alike in groupby(order, lambda one: one.asks) for one in list(alike)[:2]]
        if (found := self._first_enough(order)) is not None:
            return found
        others = [one for one in fleets if one.plan != self.plan and one.asks < 100 * OTHER_ANSWERS]
        best = max(others, key=self._promise, default=None)
        if best is None or self._promise(best) <= 0:
            return None
        known = self.asked.service.within if self.asked.service is not None else None
        way = WayOut(best, self.load.served(best.plan, 1))
        served = None if way.service is None else way.service.within
        return way if served is None or known is None or served > known else None

    def _more(self, units: list[PlanCandidate]) -> WayOut | None:
        """With more devices: the fewest of them that are enough, with the same answers if that is possible."""
        same = self._fewest([one for one in units if one.asks <= 101 * SAME_ANSWERS], self.plan.devices)
        return same or self._fewest(units, self.plan.devices)

    def _fewest(
        self, units: list[PlanCandidate], above: int, below: int = MAX_DEVICES, tries: int = TRIES
    ) -> WayOut | None:
        """The fewest devices that are enough, of more than `above` and less than `below`."""
        promised, rate = self._true, self.load.rate or 0.0
        try:
            for _ in range(tries):
                counts = [(one, ceil(rate / self._promise(one))) for one in units if self._promise(one) > 0]
                fleets = [self._fleet(one, max(above // one.plan.tp + 1, count)) for one, count in counts]
                fleets = [one for one in fleets if one.plan.devices < below]
                fleets += [apart for one in fleets for apart in self._apart(one)]
                order = sorted(fleets, key=lambda one: (one.plan.devices, one.asks, self._rank(one)))
                if (found := self._first_enough(order[:1])) is not None:
                    return found
                self._true *= 0.8  # what was promised was not kept
            return None
        finally:
            self._true = promised

    def _apart(self, one: PlanCandidate) -> Iterator[PlanCandidate]:
        """Its workers, each with one stroke, where that promises more (DistServe, Zhong et al. 2024, 2401.09670)."""
        plan = one.plan
        linked = plan.machine.link is not None or plan.machine.host is not None
        if not self.limits.apart or not 2 <= plan.workers <= 16 or plan.technique.method or not linked:
            return
        options = [replace(plan, prefill_workers=count) for count in range(1, plan.workers)]
        best = max(options, key=capacity)
        if capacity(best) > MIN_GAIN * capacity(plan):
            prefill, decode = best.prefill_workers, best.workers - best.prefill_workers
            name = f"{prefill} of the workers prefill, {decode} decode"
            yield PlanCandidate(best, (*one.changes, Change(name, "a link between them", NOTHING)))

    def _first_enough(self, order: list[PlanCandidate]) -> WayOut | None:
        for one in order[:TRIES]:
            self._tried.append(one)
            if self.load.enough(one.plan, self.load.rate, TWICE):
                return WayOut(one, self.load.served(one.plan, TWICE))
        return None

    def _frontier(self) -> tuple[tuple[int, float, str], ...]:
        """Of all whose highest rate within the objectives was simulated."""
        found, best = list[tuple[int, float, str]](), 0.0
        ways: dict[int, tuple[float, str]] = {}
        for one in (self.asked.candidate, *self._tried):
            rate = self.load.known_within(one.plan)
            if rate is not None and rate > ways.get(one.plan.devices, (0.0, ""))[0]:
                ways[one.plan.devices] = rate, describe(one)
        for devices, (rate, name) in sorted(ways.items()):
            if rate > best:
                best = rate
                found.append((devices, rate, name))
        return tuple(found)


def describe(one: PlanCandidate) -> str:
    """A candidate's changes in words."""
    return " + ".join(change.name for change in one.changes) or "as asked"
