"""The plots of a load: TTFT and ITL by rate or by users, what both strokes take of the time, sequences at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from twostroke.study.plan.load import PlannedLoad
from twostroke.study.plan.load_account import utilization
from twostroke.study.plan.page.chart import Axis, Point, Series, chart
from twostroke.study.plan.page.marks import (
    ADVISED,
    DECODE,
    LIMIT,
    OTHER,
    PREFILL,
    across,
    count,
    ms,
    objective,
    upright,
)
from twostroke.study.plan.service_level import ClosedLoopService, OpenLoopService, Percentiles

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # of the highest rate
BEYOND = 1.25  # times the rate that is asked for: where the axis ends, if not at the highest rate
FAR = 4.0  # times the highest rate: an axis that goes further is logarithmic
POINTS = 16  # numbers of users

Plot = tuple[str, str, str]


def load_plots(load: PlannedLoad, advised: PlannedLoad | None) -> Iterator[Plot]:
    """(title, SVG, caption) of each plot. `advised` is the load with all advice, if there is any; it is shown alone
    where the load itself has no room for a sequence."""
    if load.fits:
        yield from _plots(load, advised, load.rate)
    elif advised is not None and advised.fits:
        for title, svg, caption in _plots(advised, None, load.rate):
            yield f"{title}, as advised", svg, caption


def _plots(load: PlannedLoad, advised: PlannedLoad | None, rate: float | None) -> Iterator[Plot]:
    """At a rate that is asked for; by users if there is none."""
    yield from _ByUsers(load, advised).plots() if rate is None else _ByRate(load, advised, rate).plots()


@dataclass(frozen=True)
class _ByRate:
    """A load in open loop, at all rates. `asked` is its own, in requests a second."""

    load: PlannedLoad
    advised: PlannedLoad | None
    asked: float

    def plots(self) -> Iterator[Plot]:
        limits = self.load.objectives
        yield self._times("TTFT", limits.ttft_s, lambda one: one.ttft)
        yield self._times("ITL", limits.itl_s, lambda one: one.itl)
        yield (
            "Utilization by rate",
            self._chart(Axis("utilization", _percent, logarithmic=False), self._used()),
            "Parts of the time in steps with a prompt's chunk, and in steps of decode alone; and parts of the peak "
            "rate and of the bandwidth, on average over all of the time.",
        )
        if series := self._users():
            yield (
                "Users by rate",
                self._chart(Axis("users", count), series),
                "Sequences that decode at once on a worker, on average, and how many have room in its memory.",
            )

    def _times(self, name: str, limit_s: float | None, of: Callable[[OpenLoopService], Percentiles]) -> Plot:
        wanted = f"p{self.load.objectives.percent:g}"
        series = [
            Series(wanted, [(rate, 1e3 * of(one).wanted) for rate, one in self._planned], PREFILL),
            Series("p50", [(rate, 1e3 * of(one).p50) for rate, one in self._planned], DECODE),
        ]
        if self.advised is not None:
            points = [(rate, 1e3 * of(one).wanted) for rate, one in self._served(self.advised)]
            series.append(Series(f"{wanted} as advised", points, ADVISED))
        series += objective(None if limit_s is None else 1e3 * limit_s, series)
        caption = f"Beyond the highest rate, {self._highest:,.3g} requests/s, the queue grows without end."
        return f"{name} by rate", self._chart(Axis(name, ms), series), caption

    def _used(self) -> list[Series]:
        strokes = [(rate, utilization(self.load, one).values()) for rate, one in self._planned]
        series = [
            Series("prefill, of the time", [(rate, one.prefill_share) for rate, one in self._planned], PREFILL),
            Series("decode, of the time", [(rate, one.decode_share) for rate, one in self._planned], DECODE),
        ]
        for name, key, colour in (("of the peak rate", "compute", ADVISED), ("of the bandwidth", "bandwidth", OTHER)):
            points = [(rate, sum(one["time"] * one[key] for one in both)) for rate, both in strokes]
            series.append(Series(name, points, colour))
        return series

    def _users(self) -> list[Series]:
        """Empty where answers have one token, so that nobody decodes."""
        series: list[Series] = []
        first = "sequences" if self.advised is None else "as planned"
        for load, name, colour in ((self.load, first, PREFILL), (self.advised, "as advised", ADVISED)):
            points = [] if load is None else [(rate, one.sequences) for rate, one in self._served(load)]
            if any(value > 0 for _, value in points):
                series.append(Series(name, [point for point in points if point[1] > 0], colour))
        return [*series, across("room", max(1, self.load.plan.memory.users), series)] if series else []

    @cached_property
    def _planned(self) -> list[tuple[float, OpenLoopService]]:
        return self._served(self.load)

    @property
    def _highest(self) -> float:
        return self.load.most * self.load.replicas

    @property
    def _end(self) -> float:
        """The highest rate of the axis."""
        return max(self._highest, BEYOND * self.asked)

    def _served(self, load: PlannedLoad) -> list[tuple[float, OpenLoopService]]:
        """What each worker does at rates up to the highest, and at the one that is asked for."""
        highest = load.most * load.replicas
        rates = {share * min(highest, self._end) for share in SHARES} | {self.asked}
        return [(rate, found) for rate in sorted(rates) if rate <= highest and (found := load.at(rate)) is not None]

    def _chart(self, y: Axis, series: Sequence[Series]) -> str:
        lines = [
            upright(f"asked, {self.asked:,.3g}/s", self.asked, series, LIMIT),
            upright(f"highest, {self._highest:,.3g}/s", self._highest, series, OTHER),
        ]
        x = Axis("requests/s", count, logarithmic=self._end > FAR * self._highest)
        return chart("Load", x, y, [*series, *lines])


@dataclass(frozen=True)
class _ByUsers:
    """A load in closed loop, with all numbers of users up to twice as many. Means alone are known."""

    load: PlannedLoad
    advised: PlannedLoad | None

    def plots(self) -> Iterator[Plot]:
        load, limits = self.load, self.load.objectives
        again = "Each user asks again at once. Means: percentiles are not planned for a number of users."
        most, room = load.most * load.replicas, load.plan.memory.users
        yield "TTFT by users", self._chart(Axis("mean TTFT", ms), _ttft_ms, limits.ttft_s), again
        yield "ITL by users", self._chart(Axis("mean ITL", ms), _itl_ms, limits.itl_s), again
        yield (
            "Requests by users",
            self._chart(Axis("requests/s", count, logarithmic=False), _rate),
            f"Of all workers together. However many users there are, at most {most:,.3g} requests/s.",
        )
        if load.traffic.outputs.max() > 1:
            yield (
                "Sequences by users",
                self._chart(Axis("sequences", count, logarithmic=False), _sequences),
                f"That decode at once on a worker, on average; {room:,} have room in its memory.",
            )

    def _chart(
        self, y: Axis, of: Callable[[PlannedLoad, ClosedLoopService], float], limit_s: float | None = None
    ) -> str:
        asked = self.load.traffic.concurrency or 1
        series = [Series("as planned", _points(self.load, asked, of), PREFILL)]
        if self.advised is not None:
            series.append(Series("as advised", _points(self.advised, asked, of), ADVISED))
        series += objective(None if limit_s is None else 1e3 * limit_s, series)
        line = upright(f"asked, {asked:,} users", asked, series, LIMIT)
        return chart("Load", Axis("users", count, logarithmic=False), y, [*series, line])


def _points(load: PlannedLoad, asked: int, of: Callable[[PlannedLoad, ClosedLoopService], float]) -> list[Point]:
    """A value by users of all workers, for some numbers of them up to twice as many as are asked for."""
    grown = load.grown(2 * asked)
    shown = {ceil(len(grown) * i / POINTS) for i in range(1, POINTS + 1)} | {1, ceil(asked / load.replicas)}
    return [(load.replicas * one.users, of(load, one)) for one in grown if one.users in shown]


def _ttft_ms(load: PlannedLoad, one: ClosedLoopService) -> float:
    return 1e3 * one.ttft_s


def _itl_ms(load: PlannedLoad, one: ClosedLoopService) -> float:
    return 1e3 * one.itl_s


def _rate(load: PlannedLoad, one: ClosedLoopService) -> float:
    return load.replicas * one.rate


def _sequences(load: PlannedLoad, one: ClosedLoopService) -> float:
    return one.sequences


def _percent(value: float) -> str:
    return f"{value:.0%}"
