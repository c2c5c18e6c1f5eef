"""Charts as SVG text: lines over two axes, and estimates with their intervals.

A page has `STYLE` in its own style, which defines `--ink`, `--soft` and `--line`, and `color-scheme`. Points tell their
values as tooltips.
"""

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 48, 46  # margins of the plot
LEGEND_ROW, CHARACTER = 16, 6.3  # height of a row of the legend, mean width of a character
TICK_GAP = 8  # between the labels of two ticks, at least
MIN_SPAN = 4  # smallest ratio of the ends of a logarithmic axis
ROW, GROUP_GAP, NAMES, VALUES = 18, 14, 230, 90  # an interval chart's rows, and its margins for names and for values

# By number, on light and on dark.
COLOURS = (
    ("#0072b2", "#56b4e9"), ("#c44e00", "#ff9d5c"), ("#00805a", "#35c99b"), ("#6b6b70", "#a4a4aa"),
    ("#8b4f9f", "#d49be8"), ("#8a6d00", "#f0cf3e"), ("#3b3b9e", "#9a9af0"), ("#aa3333", "#ff7777"),
)  # fmt: skip
STYLE = """svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg .dashed { stroke-dasharray: 5 4; }
svg polyline, svg line { fill: none; stroke-width: 2; } svg line.grid { stroke: var(--line); stroke-width: 1; }
svg circle { stroke: transparent; stroke-width: 16; } svg circle:hover { fill: var(--ink); }
""" + "".join(
    f".s{i} {{ stroke: light-dark({light}, {dark}); }} .f{i} {{ fill: light-dark({light}, {dark}); }}\n"
    for i, (light, dark) in enumerate(COLOURS)
)

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, or points alone."""

    name: str
    points: Sequence[Point]
    colour: int  # number of the colour, from 0
    dashed: bool = False  # for limits and peaks, which are not predictions
    dots: Sequence[str] = ()  # a label for each point; such points have no line
    band: Sequence[Point] = ()  # (low, high) around each point, drawn as an area; such points have no circles


@dataclass(frozen=True)
class Axis:
    """What an axis shows: logarithmic from the least to the largest value, or linear from 0 or below."""

    title: str
    show: Callable[[float], str]  # formats a value
    logarithmic: bool = True
    top: float | None = None  # the value at the upper end of a linear axis; None for a little more than the largest
    # a logarithmic axis of whole decades, at most so many; lower values lie at its lower end. None: it ends at its
    # values.
    max_decades: int | None = None

    def ends(self, values: Sequence[float]) -> Point:
        """The values at both ends."""
        if not self.logarithmic:
            return min(0.0, *values), (self.top or 1.05 * max(0.0, *values) or 1.0)
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        if self.max_decades is not None:
            last = math.ceil(math.log10(high))
            return 10.0 ** max(last - self.max_decades, min(last - 1, math.floor(math.log10(low)))), 10.0**last
        wider = max(1.0, math.sqrt(MIN_SPAN * low / high))  # so that round values lie between both ends
        return low / wider, high * wider

    def place(self, value: float, ends: Point) -> float:
        """Where a value is between both ends, from 0 to 1."""
        low, high = ends
        if self.logarithmic:
            value, low, high = (math.log10(max(one, ends[0])) for one in (value, low, high))
        return (value - low) / (high - low)

    def ticks(self, ends: Point) -> list[float]:
        """Round values between both ends: a decade each, with 2 and 5 where there are few, or about five steps."""
        low, high = ends
        if not self.logarithmic:
            rough = (high - low) / 5
            base = 10 ** math.floor(math.log10(rough))
            step = next(base * one for one in (1, 2, 5, 10) if base * one >= rough)
            return [step * i for i in range(math.ceil(low / step), int(high / step) + 1)]
        decades, found = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1), list[float]()
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            found = [one * 10.0**decade for decade in decades for one in steps if low <= one * 10.0**decade <= high]
            if len(found) >= 4:
                break
        return found[:: math.ceil(len(found) / 8)]

    @property
    def heading(self) -> str:
        """The title, with a mark of a logarithmic scale."""
        return f"{self.title} (log)" if self.logarithmic else self.title

    def label(self, tick: float, ends: Point) -> str:
        """A tick's text; the lowest of `max_decades` stands for all values below it."""
        return ("≤ " if self.max_decades is not None and tick == ends[0] else "") + self.show(tick)


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], width: int = WIDTH) -> str:
    """Lines over shared axes, with a legend above; `width` in units of the SVG, of which it is `HEIGHT` high."""
    ends_x = x.ends([point[0] for one in series for point in one.points])
    ends_y = y.ends([value for one in series for value in (*(point[1] for point in one.points), *sum(one.band, ()))])
    legend, rows = _legend(series, width)
    top, foot = TOP + LEGEND_ROW * rows, HEIGHT - BOTTOM  # a row for the title of y

    def at(point: Point) -> Point:
        across, up = x.place(point[0], ends_x), y.place(point[1], ends_y)
        return LEFT + (width - LEFT - RIGHT) * across, foot - (foot - top) * up

    parts = [*legend, _text((LEFT + width - RIGHT) / 2, HEIGHT - 8, x.heading, "middle", soft=True)]
    parts.append(_text(4, top - 16, y.heading, "start", soft=True))
    free = 0.0  # where the label before ends: one that would overlap it is left out
    for tick in x.ticks(ends_x):
        across, _ = at((tick, ends_y[1]))
        parts.append(_line("grid", across, top, across, foot))
        half = CHARACTER * len(x.show(tick)) / 2
        if across - half >= free:
            parts.append(_text(across, foot + 16, x.show(tick), "middle", soft=True))
            free = across + half + TICK_GAP
    for tick in y.ticks(ends_y):
        _, up = at((ends_x[0], tick))
        parts += [_line("grid", LEFT, up, width - RIGHT, up)]
        parts += [_text(LEFT - 6, up + 4, y.label(tick, ends_y), "end", soft=True)]
    for one in series:
        parts += _drawn(one, x, y, at)
    return _svg(width, HEIGHT, parts, f"{title}: {y.title} by {x.title}")


def _drawn(one: Series, x: Axis, y: Axis, at: Callable[[Point], Point]) -> Iterator[str]:
    colour, places = one.colour, [at(point) for point in one.points]
    if one.band:
        pairs = list(zip(one.points, one.band, strict=True))
        low, high = ([at((point[0], ends[i])) for point, ends in pairs] for i in (0, 1))
        yield f'<polygon class="f{colour}" opacity="0.15" points="{_path([*high, *reversed(low)])}"/>'
    if not one.dots:
        yield f'<polyline class="s{colour}{" dashed" if one.dashed else ""}" points="{_path(places)}"/>'
    if one.dashed or one.band:
        return
    names = [f"{one.name}, {dot}" for dot in one.dots] or [one.name] * len(places)
    for (across, up), (value_x, value_y), name in zip(places, one.points, names, strict=True):
        told = html.escape(f"{name}: {y.show(value_y)} at {x.show(value_x)}")
        yield _circle(colour, across, up, 4.5 if one.dots else 2.5, f"<title>{told}</title>")


def _legend(series: Sequence[Series], width: int) -> tuple[list[str], int]:
    """Names in rows, and how many rows."""
    parts: list[str] = []
    across, row = float(LEFT), 0
    for one in series:
        length = 26 + CHARACTER * len(one.name)
        if across > LEFT and across + length > width - RIGHT:
            across, row = float(LEFT), row + 1
        up = 14 + LEGEND_ROW * row
        style = f"s{one.colour}{' dashed' if one.dashed else ''}"
        dot = _circle(one.colour, across + 7, up - 4, 4.5)
        parts += [dot if one.dots else _line(style, across, up - 4, across + 14, up - 4)]
        parts += [_text(across + 19, up, one.name, "start")]
        across += length + 8
    return parts, row + 1


@dataclass(frozen=True)
class Interval:
    """An estimate between two bounds, and its text; None where there is no estimate."""

    name: str
    colour: int
    bounds: tuple[float, float, float] | None  # lower bound, estimate, upper bound
    text: str = ""


def interval_chart(axis: Axis, groups: Sequence[tuple[str, Sequence[Interval]]], width: int = WIDTH) -> str:
    """A row for each estimate: a dot with its interval, in groups with a title each, over one axis."""
    ends = axis.ends([bound for _, ones in groups for one in ones for bound in one.bounds or ()])
    top, height = 24, 24 + sum(ROW * len(ones) + GROUP_GAP for _, ones in groups)

    def at(value: float) -> float:
        return NAMES + (width - NAMES - VALUES) * axis.place(value, ends)

    parts: list[str] = []
    for tick in axis.ticks(ends):
        parts += [_line("grid", at(tick), top - 8, at(tick), height - GROUP_GAP)]
        parts += [_text(at(tick), top - 12, axis.show(tick), "middle", soft=True)]
    up = float(top)
    for title, ones in groups:
        parts.append(_text(4, up + 4, title, "start"))
        for one in ones:
            parts.append(_text(NAMES - 8, up + 4, one.name, "end", soft=True))
            if one.bounds is not None:
                low, middle, high = map(at, one.bounds)
                parts += [_line(f"s{one.colour}", low, up, high, up), _circle(one.colour, middle, up, 4)]
                parts += [_text(width - VALUES + 12, up + 4, one.text, "start")]
            up += ROW
        up += GROUP_GAP
    return _svg(width, height, parts)


def as_file(svg: str) -> str:
    """A chart that needs no page around it."""
    own = (
        ":root { color-scheme: light dark; --ink: light-dark(#1c1c20, #e8e8ec); --soft: light-dark(#66666c, #a0a0a6); "
    )
    own += "--line: light-dark(#dcdce0, #3a3a40); }"
    begin, rest = svg.split(">", 1)
    return f'{begin} xmlns="http://www.w3.org/2000/svg">\n<style>{own}\n{STYLE}</style>{rest}\n'


def vertical(name: str, value: float, series: Sequence[Series], colour: int) -> Series:
    """A dashed vertical line over all points."""
    heights = [point[1] for one in series for point in one.points]
    return Series(name, [(value, min(heights)), (value, max(heights))], colour, dashed=True)


def horizontal(name: str, value: float, series: Sequence[Series], colour: int) -> Series:
    """A dashed horizontal line over all points."""
    places = [point[0] for one in series for point in one.points]
    return Series(name, [(min(places), value), (max(places), value)], colour, dashed=True)


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _circle(colour: int, x: float, y: float, radius: float, inside: str = "") -> str:
    return f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{inside}</circle>'


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str, soft: bool = False) -> str:
    style = ' class="soft"' if soft else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(width: int, height: float, parts: Sequence[str], label: str = "") -> str:
    name = f' aria-label="{html.escape(label)}"' if label else ""
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img"{name}>{"".join(parts)}</svg>'
