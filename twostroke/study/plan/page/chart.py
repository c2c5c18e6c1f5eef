"""Line charts as SVG text. Colours are classes of the page's style; points carry their values for the page's script."""

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 46  # the axes' margins
LEGEND_ROW = 16
SPAN = 4  # least ratio of the ends of a logarithmic axis
CHARACTER = 6.3  # mean width of a character of the legend

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, or points alone.

    Attributes:
        colour: number of the colour, from 0.
        dashed: for limits and peaks, which are no predictions.
        dots: points without a line, each with its label.
    """

    name: str
    points: Sequence[Point]
    colour: int
    dashed: bool = False
    dots: Sequence[str] = ()


@dataclass(frozen=True)
class Axis:
    """What an axis shows; logarithmic from the least to the largest value, or linear from 0.

    Attributes:
        show: a value in words.
    """

    title: str
    show: Callable[[float], str]
    logarithmic: bool = True

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """The values at both ends."""
        if not self.logarithmic:
            return 0.0, 1.05 * max(values)
        low, high = min(values), max(values)
        wider = max(1.0, math.sqrt(SPAN * low / high))  # so that round values lie between both ends
        return low / wider, high * wider

    def place(self, value: float, ends: tuple[float, float]) -> float:
        """Where a value is between both ends, from 0 to 1."""
        low, high = (math.log10(end) for end in ends) if self.logarithmic else ends
        return ((math.log10(value) if self.logarithmic else value) - low) / (high - low)

    def ticks(self, ends: tuple[float, float]) -> list[float]:
        """Round values between both ends: a decade each, with 2 and 5 where there are few, or about five steps."""
        low, high = ends
        if not self.logarithmic:
            rough = (high - low) / 5
            base = 10 ** math.floor(math.log10(rough))
            step = next(base * one for one in (1, 2, 5, 10) if base * one >= rough)
            return [step * i for i in range(int(high / step) + 1)]
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            found = [one * 10.0**decade for decade in decades for one in steps if low <= one * 10.0**decade <= high]
            if len(found) >= 4:
                break
        return found[:: math.ceil(len(found) / 8)]


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """The SVG of lines over shared axes, with a legend above."""
    points = [point for one in series for point in one.points]
    ends_x, ends_y = x.ends([point[0] for point in points]), y.ends([point[1] for point in points])
    legend, rows = _legend(series)
    top = TOP + LEGEND_ROW * (rows - 1)

    def at(point: Point) -> Point:
        across, up = x.place(point[0], ends_x), y.place(point[1], ends_y)
        return LEFT + (WIDTH - LEFT - RIGHT) * across, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - top) * up

    parts = [*legend, *_grid(x, y, ends_x, ends_y, at, top)]
    for one in series:
        parts += _drawn(one, x, y, at)
    label = html.escape(f"{title}: {y.title} by {x.title}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _grid(x: Axis, y: Axis, ends_x: Point, ends_y: Point, at: Callable[[Point], Point], top: float) -> Iterator[str]:
    for tick in x.ticks(ends_x):
        across, _ = at((tick, ends_y[0] or 0.0))
        yield f'<line class="grid" x1="{across:.1f}" x2="{across:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}"/>'
        yield _text(across, HEIGHT - BOTTOM + 16, x.show(tick), "middle", "soft")
    for tick in y.ticks(ends_y):
        _, up = at((ends_x[0], tick))
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up:.1f}" y2="{up:.1f}"/>'
        yield _text(LEFT - 6, up + 4, y.show(tick), "end", "soft")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.title, "middle", "soft")


def _drawn(one: Series, x: Axis, y: Axis, at: Callable[[Point], Point]) -> Iterator[str]:
    places = [at(point) for point in one.points]
    if not one.dots:
        path = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
        yield f'<polyline class="s{one.colour}{" dashed" if one.dashed else ""}" points="{path}"/>'
    for index, ((across, up), point) in enumerate(zip(places, one.points, strict=True)):
        name = f"{one.name}, {one.dots[index]}" if one.dots else one.name
        told = html.escape(f"{name}: {y.show(point[1])} at {x.show(point[0])}")
        radius = 4.5 if one.dots else 2.5
        if one.dashed:
            continue
        yield f'<circle class="f{one.colour}" cx="{across:.1f}" cy="{up:.1f}" r="{radius}" data-told="{told}"/>'


def _legend(series: Sequence[Series]) -> tuple[list[str], int]:
    """Names in rows, and how many rows."""
    parts: list[str] = []
    across, row = float(LEFT), 0
    for one in series:
        width = 26 + CHARACTER * len(one.name)
        if across > LEFT and across + width > WIDTH - RIGHT:
            across, row = float(LEFT), row + 1
        up = 14 + LEGEND_ROW * row
        if one.dots:
            parts.append(f'<circle class="f{one.colour}" cx="{across + 7:.1f}" cy="{up - 4}" r="4.5"/>')
        else:
            dashed = " dashed" if one.dashed else ""
            parts.append(
                f'<line class="s{one.colour}{dashed}" x1="{across:.1f}" x2="{across + 14:.1f}" y1="{up - 4}" '
                f'y2="{up - 4}"/>'
            )
        parts.append(_text(across + 19, up, one.name, "start", ""))
        across += width + 8
    return parts, row + 1


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
