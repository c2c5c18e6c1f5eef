"""The plots of a plan: roofline with both strokes, TTFT by length, ITL by batch, memory by users.

Those of a load are simulated: TTFT and ITL by rate or by users, and the frontier of devices and rates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from twostroke.study.charts import Axis, Point, Series, horizontal, line_chart, vertical
from twostroke.study.plan.plan import Plan
from twostroke.study.plan.search import Advice
from twostroke.study.plan.service import LoadSimulator, Service
from twostroke.study.roofline.roofline import StepTime
from twostroke.study.traffic.requests import ClosedLoop

PREFILL, DECODE, ADVISED, LIMIT, OTHER = range(5)  # colours
LENGTHS, BATCHES = tuple(2**i for i in range(5, 21)), (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = (0.2, 0.5, 0.8, 0.95)  # of the highest rate, or of the users

Plot = tuple[str, str, str]  # title, SVG, caption


def plots(plan: Plan, advised: Plan | None) -> Iterator[Plot]:
    """Each plot. `advised` is the plan with all advice, if there is any."""
    yield (
        "Roofline",
        roofline(plan),
        "How many FLOPs a second each stroke reaches on one device, by how many it does for each byte read. "
        "The dashed line is the machine's peak, the other what is expected of it.",
    )
    yield "TTFT by length of the prompt", ttft(plan, advised), "A prefill in one step, without queueing."
    room = ". Beyond the last dot there is no room for another sequence" if plan.fits else ", as if all of them fitted"
    yield "ITL by batch", itl(plan, advised), f"A step in which every sequence makes a token{room}."
    yield "Memory by users", memory(plan, advised), "Weights, and the KV of so many sequences of full length."


def roofline(plan: Plan) -> str:
    """The peak, the expected roof, and where prefill and decode by batch lie."""
    machine, dtype = plan.machine, plan.roofline.dtype
    peak, bandwidth = machine.flops[dtype], machine.bandwidth
    prefill, *decodes = [_reached(step) for step in (plan.prefill, *(plan.decode(batch) for batch in BATCHES))]
    intensities = [intensity for intensity, _ in (prefill, *decodes)]
    ends = min(0.5, *intensities) / 2, max(4 * machine.balance(dtype), *intensities) * 2

    def roof(compute: float, memory: float) -> list[Point]:
        knee = peak * compute / (bandwidth * memory)
        return [(at, min(peak * compute, bandwidth * memory * at)) for at in (ends[0], knee, ends[1])]

    series = [
        Series(f"peak ({dtype})", roof(1, 1), LIMIT, dashed=True),
        Series("expected", roof(machine.compute, machine.memory_share), OTHER),
        Series("prefill", [prefill], PREFILL, dots=[f"{plan.workload.prompt:,} tokens"]),
        Series("decode, batch 1 to 256", decodes, DECODE, dots=[f"batch {batch}" for batch in BATCHES]),
    ]
    return line_chart("Roofline", Axis("FLOPs a byte", count), Axis("FLOP/s", _rate), series)


def _reached(step: StepTime) -> Point:
    """(FLOPs a byte, FLOP/s) of a step on one device."""
    return step.flops / step.bytes, step.flops / step.seconds


def ttft(plan: Plan, advised: Plan | None) -> str:
    """TTFT by prompts from 32 tokens to all that the model can hold; the shared prefix keeps its share."""
    longest, load = plan.model.max_position - plan.workload.output, plan.workload

    def points(one: Plan) -> list[Point]:
        lengths = {length for length in LENGTHS if one.technique.entered(length) <= longest} | {one.workload.prompt}
        return [(length, _of_length(one, length).ttft_ms) for length in sorted(lengths)]

    series = _both(plan, advised, points)
    return line_chart(
        "TTFT", Axis("tokens of the prompt", count), Axis("TTFT", ms), [*series, *objective(load.ttft_ms, series)]
    )


def itl(plan: Plan, advised: Plan | None) -> str:
    """ITL by sequences at once, as many as fit, or up to 256 where none does."""

    def points(one: Plan) -> list[Point]:
        most = one.memory.users if one.fits else BATCHES[-1]
        batches = {*BATCHES, one.workload.concurrency, min(most, BATCHES[-1])}
        return [(batch, 1e3 * one.decode(batch).seconds) for batch in sorted(batches) if batch <= most]

    series = _both(plan, advised, points)
    return line_chart(
        "ITL", Axis("sequences at once", count), Axis("ITL", ms), [*series, *objective(plan.workload.itl_ms, series)]
    )


def memory(plan: Plan, advised: Plan | None) -> str:
    """Memory by users, and what there is without the reserve."""
    plans = [one for one in (plan, advised) if one is not None]
    most = max(8, 2 * plan.workload.concurrency, min(256, 2 * max(one.memory.users for one in plans)))
    users = sorted({round(most * i / 8) for i in range(9)})
    series: list[Series] = []
    for one, name, colour in zip(plans, ("as planned", "as advised"), (PREFILL, ADVISED), strict=False):
        held = [(count, one.memory.weights + one.memory.passing + count * one.memory.kv_per_user) for count in users]
        if all(held != known.points for known in series):
            series.append(Series(name, held, colour))
        if one is plan or one.capacity != plan.capacity:
            size = f"{one.tp} device{'s' if one.tp > 1 else ''}, {_bytes(one.capacity)}"
            series.append(Series(size, [(0, one.capacity), (most, one.capacity)], LIMIT, dashed=True))
    x, y = Axis("users at once", count, logarithmic=False), Axis("memory", _bytes, logarithmic=False)
    return line_chart("Memory", x, y, series)


def _both(plan: Plan, advised: Plan | None, points: Callable[[Plan], list[Point]]) -> list[Series]:
    series = [Series("as planned", points(plan), PREFILL)]
    return series if advised is None else [*series, Series("as advised", points(advised), ADVISED)]


def _of_length(plan: Plan, prompt: int) -> Plan:
    load = plan.workload
    return replace(plan, workload=replace(load, prompt=prompt, shared=load.shared * prompt // load.prompt))


def objective(limit_ms: float | None, series: Sequence[Series]) -> list[Series]:
    """A line over all points, if there is an objective."""
    return [] if limit_ms is None else [horizontal(f"objective, {limit_ms:,g} ms", limit_ms, series, LIMIT)]


def count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def ms(value: float) -> str:
    return f"{value / 1e3:,.3g} s" if value >= 1e3 else f"{value:.3g} ms"


def _scaled(value: float, units: Sequence[str]) -> str:
    place = 0
    while value >= 1000 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.3g} {units[place]}".strip()


_bytes = partial(_scaled, units=("B", "KB", "MB", "GB", "TB"))
_rate = partial(_scaled, units=("", "K", "M", "G", "T", "P"))


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
