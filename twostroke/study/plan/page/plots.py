"""The plots of a plan: roofline with both strokes, TTFT by length, ITL by batch, memory by users."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from twostroke.study.charts import Axis, Point, Series, horizontal, line_chart
from twostroke.study.plan.plan import Plan
from twostroke.study.roofline.roofline import StepTime

PREFILL, DECODE, ADVISED, LIMIT, OTHER = range(5)  # colours
LENGTHS, BATCHES = tuple(2**i for i in range(5, 21)), (1, 2, 4, 8, 16, 32, 64, 128, 256)

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
