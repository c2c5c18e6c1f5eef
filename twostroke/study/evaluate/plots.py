"""Plots as SVG text; colours are classes of the page's style, one for each method, the same in every plot."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from twostroke.study.evaluate.statistics import Estimate

WIDTH, LEFT, RIGHT = 760, 230, 90
ROW, GAP, TOP = 18, 14, 24
COLOURS = 8
HEIGHT, LEGEND = 260, 16


def intervals(groups: Sequence[tuple[str, Mapping[str, Estimate]]], methods: Sequence[str], share: bool = False) -> str:
    """A dot with its interval for every method, in groups that share an axis. From 0; to 1 for shares."""
    known = [estimate for _, by_method in groups for estimate in by_method.values() if estimate.n]
    low = min(0.0, *(estimate.low for estimate in known))
    top = 1.0 if share else _nice(max(estimate.high for estimate in known))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (top - low)

    parts, y = [], TOP
    bottom = TOP + sum(ROW * len(methods) + GAP for _ in groups)
    for tick in (low + (top - low) * i / 4 for i in range(5)):
        label = f"{tick:.0%}" if share else f"{tick:.3g}"
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 8}" y2="{bottom - GAP}"/>')
        parts.append(_text(x(tick), TOP - 12, label, "middle", soft=True))
    for title, by_method in groups:
        parts.append(_text(4, y + 4, title, "start"))
        for name in methods:
            estimate, colour = by_method[name], methods.index(name) % COLOURS
            parts.append(_text(LEFT - 8, y + 4, name, "end", soft=True))
            if estimate.n:
                value = f"{estimate.value:.1%}" if share else f"{estimate.value:.4g}"
                left, right, middle = x(estimate.low), x(estimate.high), x(estimate.value)
                parts.append(f'<line class="s{colour}" x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>')
                parts.append(f'<circle class="f{colour}" cx="{middle:.1f}" cy="{y}" r="4"/>')
                parts.append(_text(WIDTH - RIGHT + 12, y + 4, value, "start"))
            y += ROW
        y += GAP
    return _svg(bottom, parts)


def curves(by_method: Mapping[str, Sequence[Estimate]], methods: Sequence[str]) -> str:
    """A line with its band for every method, over positions from 1, on a logarithmic axis of five decades at most."""
    known = [estimate for ones in by_method.values() for estimate in ones if estimate.n]
    highest = max(estimate.high for estimate in known)
    top = math.ceil(math.log10(highest)) if highest > 0 else 0
    least = min((estimate.value for estimate in known if estimate.value > 0), default=1.0)
    floor = max(top - 5, min(top - 1, math.floor(math.log10(least))))
    length = max(map(len, by_method.values()))
    left, right, foot = 70, 20, 40
    head = TOP + LEGEND * ((len(by_method) - 1) // 4)
    height = HEIGHT + head

    def x(place: int) -> float:
        return left + (WIDTH - left - right) * (place - 1) / max(1, length - 1)

    def y(value: float) -> float:
        decades = max(math.log10(value), floor) if value > 0 else floor
        return height - foot - (height - foot - head) * (decades - floor) / (top - floor)

    parts: list[str] = []
    for tick in range(floor, top + 1):
        at, label = y(10.0**tick), f"{10.0**tick:g}"
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, f"≤ {label}" if tick == floor else label, "end", soft=True))
    for place in sorted({1, *(round(length * i / 8) or 1 for i in range(1, 9))}):
        parts.append(_text(x(place), height - foot + 18, str(place), "middle", soft=True))
    parts.append(_text((left + WIDTH - right) / 2, height - 6, "token of the answer", "middle", soft=True))
    for at, (name, ones) in enumerate(by_method.items()):
        colour = methods.index(name) % COLOURS
        points = [(x(place), one) for place, one in enumerate(ones, 1) if one.n]
        upper = [f"{px:.1f},{y(one.high):.1f}" for px, one in points]
        lower = [f"{px:.1f},{y(one.low):.1f}" for px, one in reversed(points)]
        parts.append(f'<polygon class="f{colour}" opacity="0.15" points="{" ".join(upper + lower)}"/>')
        line = " ".join(f"{px:.1f},{y(one.value):.1f}" for px, one in points)
        parts.append(f'<polyline class="s{colour}" points="{line}"/>')
        column, row = left + 170 * (at % 4), LEGEND * (at // 4)
        parts.append(f'<rect class="f{colour}" x="{column}" y="{row + 6}" width="12" height="4"/>')
        parts.append(_text(column + 18, row + 12, name, "start"))
    return _svg(height, parts)


def _nice(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten; 1 for numbers of at most 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def _text(x: float, y: float, text: str, anchor: str, soft: bool = False) -> str:
    style = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{html.escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
