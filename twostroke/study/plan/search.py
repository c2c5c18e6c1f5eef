"""The cheapest configuration of the whole space that keeps the objectives.

Price: devices first, then how much a change asks (`Change.asks`). Watts and money are devices times a constant.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, floor, log

from twostroke.study.plan.capacity import capacity, tuned
from twostroke.study.plan.changes import (
    NOTHING,
    ONE_WORKER,
    OTHER_ANSWERS,
    SAME_ANSWERS,
    Change,
    ChangeLimits,
    PlanCandidate,
    change_space,
    other_requests,
)
from twostroke.study.plan.plan import BUDGET, Plan
from twostroke.study.plan.service import LoadSimulator, Service

TRIES = 4  # candidates of a way out that are simulated
MAX_DEVICES = 1 << 20
TWICE = 2  # with two draws of requests
HOPE = 0.85  # part of a rate that a candidate must promise to be simulated
MIN_GAIN = 1.1  # times as much must be promised by workers of one stroke, or by a technique


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
    """What was asked for, and ways out."""

    asked: WayOut
    # the mildest change without more devices, or what serves most with them; None if nothing helps
    same: WayOut | None = None
    more: WayOut | None = None  # the fewest more devices with the same answers, or with others if these are not enough
    # the fewest devices of all that are enough, with answers to be checked at most, where these are fewer than what was
    # asked for or is advised; None if nothing does with fewer
    cheapest: WayOut | None = None
    # devices and rate within the objectives of what was simulated, each better than all with fewer devices
    frontier: tuple[tuple[int, float, str], ...] = ()

    @property
    def best(self) -> WayOut:
        """What is advised: the first of these that is enough, or else what serves most without more devices."""
        ways = [way for way in (self.asked, self.same, self.cheapest, self.more) if way is not None]
        return next((way for way in ways if way.enough), self.same or self.asked)


def advise(plan: Plan, limits: ChangeLimits) -> Advice:
    """Search without a load: nobody waits for anybody else."""
    asked = WayOut(PlanCandidate(plan))
    space = [one for one in change_space(plan, limits) if one.plan.verdict == "nothing to do"]
    if plan.workers > 1:
        space = [one + PlanCandidate(one.plan, (ONE_WORKER,)) for one in space]
    other = [one for one in other_requests(plan, limits) if one.plan.verdict == "nothing to do"]
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
        space = [one for one in change_space(self.plan, self.limits) if one.plan.memory.users > 0]
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
        if workers == self.plan.workers == 1:
            return unit
        if workers == 1:
            return PlanCandidate(unit.plan, (*unit.changes, ONE_WORKER))
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
        if (found := next((one for one in order[:TRIES] if self._enough(one)), None)) is not None:
            return WayOut(found, self.load.served(found.plan, TWICE))
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
                fleets = [(one, self._fleet(one, max(above // one.plan.tp + 1, count))) for one, count in counts]
                fleets = [(one, fleet) for one, fleet in fleets if fleet.plan.devices < below]
                fleets += [(one, apart) for one, fleet in fleets for apart in self._apart(fleet)]
                order = sorted(fleets, key=lambda two: (two[1].plan.devices, two[1].asks, self._rank(two[1])))
                if order and self._enough(order[0][1]):
                    found = self._trimmed(*order[0], above)
                    return WayOut(found, self.load.served(found.plan, TWICE))
                self._true *= 0.8  # what was promised was not kept
            return None
        finally:
            self._true = promised

    def _trimmed(self, unit: PlanCandidate, found: PlanCandidate, above: int) -> PlanCandidate:
        """With as few workers as are enough, to a thirtieth: less may have been promised than is kept."""
        low = max(above // unit.plan.tp, floor((self.load.rate or 0.0) / self.load.highest(unit.plan)))  # not enough
        while not found.plan.prefill_workers and found.plan.workers - low > 1 + low // 30:
            one = self._fleet(unit, (low + found.plan.workers) // 2)
            if self._enough(one):
                found = one
            else:
                low = one.plan.workers
        return found

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

    def _enough(self, one: PlanCandidate) -> bool:
        self._tried.append(one)
        return self.load.enough(one.plan, self.load.rate, TWICE)

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
