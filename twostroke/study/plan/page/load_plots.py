"""The plots of a load: TTFT and ITL by rate or by users, and the frontier of devices and rates. All is simulated."""

from collections.abc import Iterator, Sequence

from twostroke.study.charts import Axis, Series, line_chart, vertical
from twostroke.study.plan.page.plots import ADVISED, DECODE, LIMIT, OTHER, PREFILL, Plot, count, ms, objective
from twostroke.study.plan.plan import Plan
from twostroke.study.plan.search import Advice
from twostroke.study.plan.service import LoadSimulator, Service
from twostroke.study.traffic.requests import ClosedLoop

SHARES = (0.2, 0.5, 0.8, 0.95)  # of the highest rate, or of the users


def load_plots(advice: Advice, load: LoadSimulator) -> Iterator[Plot]:
    """Each plot. The advised configuration is shown beside the one that was asked for; those without room are not."""
    plans = [("as planned", advice.asked.plan)]
    plans += [] if advice.best is advice.asked else [("as advised", advice.best.plan)]
    found = [(name, plan, _points(plan, load)) for name, plan in plans if plan.memory.users]
    yield from (plot for plot in (_times(found, load, "TTFT", "ttft"), _times(found, load, "ITL", "gaps")) if plot)
    if len(advice.frontier) > 1:
        points = [(float(devices), rate) for devices, rate, _ in advice.frontier]
        dots = [f"{devices} devices, {how}" for devices, _, how in advice.frontier]
        x, y = Axis("devices", count), Axis("requests/s within the objectives", count)
        yield (
            "Rate by devices",
            line_chart("Frontier", x, y, [Series("found", points, ADVISED, dots=dots)]),
            "The highest rate within the objectives of what was simulated, each better than all with fewer devices.",
        )


def _points(plan: Plan, load: LoadSimulator) -> list[tuple[float, Service]]:
    """(rate or users, what is served) up to the highest rate, or up to the users."""
    if load.rate is None:
        users = load.traffic.concurrency or 1
        wanted = sorted({max(1, round(share * users)) for share in (*SHARES, 1.0)})
        loads = [LoadSimulator(load.traffic.in_closed_loop(ClosedLoop(one)), load.objectives) for one in wanted]
        return [(float(users), one.served(plan, 1)) for users, one in zip(wanted, loads, strict=True)]
    highest = load.highest(plan)
    rates: set[float] = {share * highest for share in SHARES}
    rates |= {load.rate} if load.rate <= highest else set()
    return [(rate, load.at(plan, rate)) for rate in sorted(rates)]


def _times(
    found: Sequence[tuple[str, Plan, Sequence[tuple[float, Service]]]], load: LoadSimulator, name: str, values: str
) -> Plot | None:
    """A time by rate, with the objective and the rate that is asked for; None where there is none to show."""
    percent, limits = load.objectives.percent, load.objectives
    limit = limits.ttft_s if name == "TTFT" else limits.itl_s
    series = list[Series]()
    for (title, _, points), colours in zip(found, ((PREFILL, DECODE), (ADVISED, OTHER)), strict=False):
        for which, colour in zip((percent, 50.0), colours, strict=True):
            shown = [(at, 1e3 * one.at(values, which)) for at, one in points]
            shown = [(at, value) for at, value in shown if 0 < value < float("inf")]
            series += [Series(f"p{which:g} {title}", shown, colour)] if shown else []
    if not series:
        return None
    series += objective(None if limit is None else 1e3 * limit, series)
    asked, unit = (load.rate, "requests/s") if load.rate is not None else (load.traffic.concurrency or 1, "users")
    series.append(vertical(f"asked, {asked:,.3g}", float(asked), series, LIMIT))
    caption = "Simulated up to the highest rate, beyond which the queue grows without end."
    if load.rate is None:
        caption = "Each user asks again at once."
    return f"{name} by {unit}", line_chart("Load", Axis(unit, count), Axis(name, ms), series), caption
