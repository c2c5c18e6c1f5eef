"""The plots of a load: TTFT and ITL by rate or by users, what both strokes take of the time, sequences at once."""

from collections.abc import Callable, Iterator
from math import ceil

from twostroke.study.charts import Axis, Series, horizontal, line_chart, vertical
from twostroke.study.plan.load import PlannedLoad
from twostroke.study.plan.load_account import utilization
from twostroke.study.plan.page.plots import ADVISED, DECODE, LIMIT, OTHER, PREFILL, Plot, count, ms, objective
from twostroke.study.plan.service_level import ClosedLoopService, OpenLoopService, Percentiles

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # of the highest rate
BEYOND = 1.25  # times the rate that is asked for: where the axis ends, if not at the highest rate
FAR = 4.0  # times the highest rate: an axis that goes further is logarithmic
POINTS = 16  # numbers of users


def load_plots(load: PlannedLoad, advised: PlannedLoad | None) -> Iterator[Plot]:
    """Each plot, by rate or by users. `advised` is the load with all advice, if there is any; it is shown alone where
    the load itself has no room for a sequence."""
    if load.fits:
        yield from _by_users(load, advised) if load.rate is None else _by_rate(load, advised, load.rate)
    elif advised is not None and advised.fits:
        made = _by_users(advised, None) if load.rate is None else _by_rate(advised, None, load.rate)
        for title, svg, caption in made:
            yield f"{title}, as advised", svg, caption


def _by_rate(load: PlannedLoad, advised: PlannedLoad | None, asked: float) -> Iterator[Plot]:
    """A load in open loop, at rates up to the highest, and at the one that is `asked` for, in requests a second."""
    highest, limits, wanted = load.max_rate * load.replicas, load.objectives, f"p{load.objectives.percent:g}"
    end = max(highest, BEYOND * asked)
    x = Axis("requests/s", count, logarithmic=end > FAR * highest)

    def served(one: PlannedLoad) -> list[tuple[float, OpenLoopService]]:
        most = one.max_rate * one.replicas
        rates = {share * min(most, end) for share in SHARES} | {asked}
        return [(rate, found) for rate in sorted(rates) if rate <= most and (found := one.at(rate)) is not None]

    planned, better = served(load), [] if advised is None else served(advised)

    def chart(y: Axis, series: list[Series]) -> str:
        lines = [
            vertical(f"asked, {asked:,.3g}/s", asked, series, LIMIT),
            vertical(f"highest, {highest:,.3g}/s", highest, series, OTHER),
        ]
        return line_chart("Load", x, y, [*series, *lines])

    def times(name: str, limit_s: float | None, of: Callable[[OpenLoopService], Percentiles]) -> Plot:
        series = [
            Series(wanted, [(rate, 1e3 * of(one).wanted) for rate, one in planned], PREFILL),
            Series("p50", [(rate, 1e3 * of(one).p50) for rate, one in planned], DECODE),
        ]
        if advised is not None:
            points = [(rate, 1e3 * of(one).wanted) for rate, one in better]
            series.append(Series(f"{wanted} as advised", points, ADVISED))
        series += objective(None if limit_s is None else 1e3 * limit_s, series)
        caption = f"Beyond the highest rate, {highest:,.3g} requests/s, the queue grows without end."
        return f"{name} by rate", chart(Axis(name, ms), series), caption

    yield times("TTFT", limits.ttft_s, lambda one: one.ttft)
    yield times("ITL", limits.itl_s, lambda one: one.itl)
    used = [(rate, utilization(load, one).values()) for rate, one in planned]
    series = [
        Series("prefill, of the time", [(rate, one.prefill_share) for rate, one in planned], PREFILL),
        Series("decode, of the time", [(rate, one.decode_share) for rate, one in planned], DECODE),
    ]
    for name, key, colour in (("of the peak rate", "compute", ADVISED), ("of the bandwidth", "bandwidth", OTHER)):
        points = [(rate, sum(one["time"] * one[key] for one in both)) for rate, both in used]
        series.append(Series(name, points, colour))
    yield (
        "Utilization by rate",
        chart(Axis("utilization", "{:.0%}".format, logarithmic=False), series),
        "Parts of the time in steps with a prompt's chunk, and in steps of decode alone; and parts of the peak rate "
        "and of the bandwidth, on average over all of the time.",
    )
    series = []  # empty where answers have one token, so that nobody decodes
    first = "sequences" if advised is None else "as planned"
    for found, name, colour in ((planned, first, PREFILL), (better, "as advised", ADVISED)):
        if points := [(rate, one.sequences) for rate, one in found if one.sequences > 0]:
            series.append(Series(name, points, colour))
    if series:
        yield (
            "Users by rate",
            chart(Axis("users", count), [*series, horizontal("room", max(1, load.plan.memory.users), series, LIMIT)]),
            "Sequences that decode at once on a worker, on average, and how many have room in its memory.",
        )


def _by_users(load: PlannedLoad, advised: PlannedLoad | None) -> Iterator[Plot]:
    """A load in closed loop, with all numbers of users up to twice as many. Means alone are known."""
    asked, limits, most = load.traffic.concurrency or 1, load.objectives, load.max_rate * load.replicas
    shown = [(load, "as planned", PREFILL), *([] if advised is None else [(advised, "as advised", ADVISED)])]
    grown = [(one, name, colour, _grown(one, asked)) for one, name, colour in shown]

    def chart(y: Axis, of: Callable[[PlannedLoad, ClosedLoopService], float], limit_s: float | None = None) -> str:
        series = [
            Series(name, [(users, of(one, each)) for users, each in some], colour) for one, name, colour, some in grown
        ]
        series += objective(None if limit_s is None else 1e3 * limit_s, series)
        line = vertical(f"asked, {asked:,} users", asked, series, LIMIT)
        return line_chart("Load", Axis("users", count, logarithmic=False), y, [*series, line])

    again = "Each user asks again at once. Means: percentiles are not planned for a number of users."
    yield "TTFT by users", chart(Axis("mean TTFT", ms), lambda _, one: 1e3 * one.ttft_s, limits.ttft_s), again
    yield "ITL by users", chart(Axis("mean ITL", ms), lambda _, one: 1e3 * one.itl_s, limits.itl_s), again
    yield (
        "Requests by users",
        chart(Axis("requests/s", count, logarithmic=False), lambda load, one: load.replicas * one.rate),
        f"Of all workers together. However many users there are, at most {most:,.3g} requests/s.",
    )
    if load.traffic.outputs.max() > 1:
        yield (
            "Sequences by users",
            chart(Axis("sequences", count, logarithmic=False), lambda _, one: one.sequences),
            f"That decode at once on a worker, on average; {load.plan.memory.users:,} have room in its memory.",
        )


def _grown(load: PlannedLoad, asked: int) -> list[tuple[int, ClosedLoopService]]:
    """(users of all workers, what each worker does) for some numbers of users, up to twice as many as `asked`."""
    grown = load.grown(2 * asked)
    shown = {ceil(len(grown) * i / POINTS) for i in range(1, POINTS + 1)} | {1, ceil(asked / load.replicas)}
    return [(load.replicas * one.users, one) for one in grown if one.users in shown]
