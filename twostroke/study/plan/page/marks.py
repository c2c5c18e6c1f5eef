"""What all plots have in common: colours, limits as dashed lines, and values in words."""

from collections.abc import Sequence

from twostroke.study.plan.page.chart import Series

PREFILL, DECODE, ADVISED, LIMIT, OTHER = range(5)  # colours


def objective(limit: float | None, series: Sequence[Series]) -> list[Series]:
    """A horizontal line over all points, in milliseconds, if there is an objective."""
    return [] if limit is None else [across(f"objective, {limit:g} ms", limit, series)]


def across(name: str, value: float, series: Sequence[Series]) -> Series:
    """A horizontal line over all points."""
    places = [point[0] for one in series for point in one.points]
    return Series(name, [(min(places), value), (max(places), value)], LIMIT, dashed=True)


def upright(name: str, value: float, series: Sequence[Series], colour: int) -> Series:
    """A vertical line over all points."""
    heights = [point[1] for one in series for point in one.points]
    return Series(name, [(value, min(heights)), (value, max(heights))], colour, dashed=True)


def count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def ms(value: float) -> str:
    return f"{value / 1e3:,.3g} s" if value >= 1e3 else f"{value:.3g} ms"
