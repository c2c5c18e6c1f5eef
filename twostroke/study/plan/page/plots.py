"""The plots of a plan: roofline with both strokes, TTFT by length, ITL by batch, memory by users."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from twostroke.study.plan.page.chart import Axis, Point, Series, chart
from twostroke.study.plan.page.marks import ADVISED, DECODE, LIMIT, OTHER, PREFILL, count, ms, objective
from twostroke.study.plan.plan import Plan
from twostroke.study.plan.roofline import StepTime

LENGTHS, BATCHES = tuple(2**i for i in range(5, 21)), (1, 2, 4, 8, 16, 32, 64, 128, 256)


def plots(plan: Plan, advised: Plan | None) -> Iterator[tuple[str, str, str]]:
    """(title, SVG, caption) of each plot. `advised` is the plan with all advice, if there is any."""
    yield (
        "Roofline",
        roofline(plan),
        (
            "How many FLOPs a second each stroke reaches on one device, by how many it does for each byte read. "
            "The dashed line is the machine's peak, the other what is expected of it."
        ),
    )
    yield "TTFT by length of the prompt", ttft(plan, advised), "A prefill in one step, without queueing."
    yield (
        "ITL by batch",
        itl(plan, advised),
        (
            "A step in which every sequence makes a token. Beyond the last dot there is no room for another sequence."
            if plan.fits
            else "A step in which every sequence makes a token, as if all of them fitted."
        ),
    )
    yield "Memory by users", memory(plan, advised), "Weights, and the KV of so many sequences of full length."


def roofline(plan: Plan) -> str:
    """Peak, expected roof, the parts of both strokes, and decode by batch."""
    machine, dtype = plan.machine, plan.roofline.dtype
    peak, bandwidth = machine.flops[dtype], machine.bandwidth
    steps = [plan.prefill, *(plan.decode(batch) for batch in BATCHES)]
    reached = [intensity(step) for step in steps]
    ends = min(0.5, *reached) / 2, max(4 * machine.balance(dtype), *reached) * 2

    def roof(compute: float, memory: float) -> list[Point]:
        knee = peak * compute / (bandwidth * memory)
        return [(at, min(peak * compute, bandwidth * memory * at)) for at in (ends[0], knee, ends[1])]

    series = [
        Series(f"peak ({dtype})", roof(1, 1), LIMIT, dashed=True),
        Series("expected", roof(machine.compute, machine.memory_share), OTHER),
        Series("prefill", [speed(plan.prefill)], PREFILL, dots=[f"{plan.workload.prompt:,} tokens"]),
        Series(
            "decode, batch 1 to 256",
            [speed(step) for step in steps[1:]],
            DECODE,
            dots=[f"batch {batch}" for batch in BATCHES],
        ),
    ]
    return chart("Roofline", Axis("FLOPs a byte", count), Axis("FLOP/s", _rate), series)


def ttft(plan: Plan, advised: Plan | None) -> str:
    """By prompts from 32 tokens to all that the model can hold; the shared prefix keeps its share."""
    longest = plan.model.max_position - plan.workload.output

    def points(one: Plan) -> list[Point]:
        return [(length, _of_length(one, length).ttft_ms) for length in _lengths(one, longest)]

    series = list(_both(plan, advised, points))
    series += objective(plan.workload.ttft_ms, series)
    return chart("TTFT", Axis("tokens of the prompt", count), Axis("TTFT", ms), series)


def itl(plan: Plan, advised: Plan | None) -> str:
    """By sequences at once, as many as fit, or up to 256 where none does."""

    def points(one: Plan) -> list[Point]:
        return [(batch, 1e3 * one.decode(batch).seconds) for batch in _batches(one)]

    series = list(_both(plan, advised, points))
    series += objective(plan.workload.itl_ms, series)
    return chart("ITL", Axis("sequences at once", count), Axis("ITL", ms), series)


def memory(plan: Plan, advised: Plan | None) -> str:
    """Against what there is without the reserve."""
    room = max(one.memory.users for one in (plan, advised) if one is not None)
    most = max(8, 2 * plan.workload.concurrency, min(256, 2 * room))
    users = sorted({round(most * i / 8) for i in range(9)})
    series: list[Series] = []
    for one, name, colour in ((plan, "as planned", PREFILL), (advised, "as advised", ADVISED)):
        if one is None:
            continue
        held = [(count, one.memory.weights + one.memory.passing + count * one.memory.kv_per_user) for count in users]
        if all(held != known.points for known in series):
            series.append(Series(name, held, colour))
        if one is plan or one.capacity != plan.capacity:
            size = f"{one.tp} device{'s' if one.tp > 1 else ''}"
            series.append(Series(size, [(0, one.capacity), (most, one.capacity)], LIMIT, dashed=True))
    return chart("Memory", Axis("users", count, logarithmic=False), Axis("memory", _bytes, logarithmic=False), series)


def speed(step: StepTime) -> Point:
    """(FLOPs a byte, FLOP/s) of a step on one device."""
    return intensity(step), step.flops / step.seconds


def intensity(step: StepTime) -> float:
    return step.flops / step.bytes


def _both(plan: Plan, advised: Plan | None, points: Callable[[Plan], list[Point]]) -> Iterator[Series]:
    yield Series("as planned", points(plan), PREFILL)
    if advised is not None:
        yield Series("as advised", points(advised), ADVISED)


def _of_length(plan: Plan, prompt: int) -> Plan:
    load = plan.workload
    return replace(plan, workload=replace(load, prompt=prompt, shared=load.shared * prompt // load.prompt))


def _lengths(plan: Plan, longest: int) -> list[int]:
    entered = [length for length in LENGTHS if plan.technique.entered(length) <= longest]
    return sorted({*entered, plan.workload.prompt})


def _batches(plan: Plan) -> list[int]:
    most = plan.memory.users if plan.fits else max(BATCHES)
    return sorted({batch for batch in (*BATCHES, plan.workload.concurrency, min(most, max(BATCHES))) if batch <= most})


def _bytes(value: float) -> str:
    return _scaled(value, ("B", "KB", "MB", "GB", "TB"))


def _rate(value: float) -> str:
    return _scaled(value, ("", "K", "M", "G", "T", "P"))


def _scaled(value: float, units: Sequence[str]) -> str:
    place = 0
    while value >= 1000 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.3g} {units[place]}".strip()
