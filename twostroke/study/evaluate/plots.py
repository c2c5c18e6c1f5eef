"""The plots of a report: a colour for each method, the same in every plot."""

import re
from collections.abc import Mapping, Sequence

from twostroke.study.charts import Axis, Interval, Series, interval_chart, line_chart
from twostroke.study.evaluate.statistics import Estimate

WIDTH = 760
COLOURS = 8
_BUDGET = re.compile(r"(?<=[:,])(ratio|budget|window)=[^,]+,?")


def intervals(groups: Sequence[tuple[str, Mapping[str, Estimate]]], methods: Sequence[str], share: bool = False) -> str:
    """A dot with its interval for every method, in groups that share an axis. From 0; to 1 for shares."""

    def row(name: str, one: Estimate) -> Interval:
        bounds = (one.low, one.value, one.high) if one.n else None
        return Interval(name, _colour(name, methods), bounds, f"{one.value:.1%}" if share else f"{one.value:.4g}")

    show, top = ("{:.0%}".format, 1.0) if share else ("{:.3g}".format, None)
    rows = [(title, [row(name, by_method[name]) for name in methods]) for title, by_method in groups]
    return interval_chart(Axis("", show, logarithmic=False, top=top), rows, WIDTH)


def curves(by_method: Mapping[str, Sequence[Estimate]], methods: Sequence[str]) -> str:
    """A line with its band for every method, over positions from 1, on a logarithmic axis of five decades at most."""
    series: list[Series] = []
    for name, ones in by_method.items():
        known = [(place, one) for place, one in enumerate(ones, 1) if one.n]
        points, band = [(place, one.value) for place, one in known], [(one.low, one.high) for _, one in known]
        series.append(Series(name, points, _colour(name, methods), band=band))
    x = Axis("token of the answer", "{:g}".format, logarithmic=False)
    return line_chart("Distance", x, Axis("nats", "{:g}".format, max_decades=5), series, WIDTH)


def by_bytes(title: str, points: Mapping[str, tuple[float, float]], share: bool) -> str:
    """A line for each technique, over the part of the baseline's KV that its settings keep."""
    families: dict[str, list[tuple[float, float]]] = {}
    for name, point in points.items():
        families.setdefault(_BUDGET.sub("", name).rstrip(":,"), []).append(point)
    series = [Series(name, sorted(ones), index % COLOURS) for index, (name, ones) in enumerate(families.items())]
    x = Axis("KV kept, as a share of the baseline's", "{:g}".format, logarithmic=False)
    y = Axis(title, "{:.0%}".format if share else "{:g}".format, logarithmic=not share, top=1.0 if share else None)
    return line_chart(title, x, y, series, WIDTH)


def _colour(name: str, methods: Sequence[str]) -> int:
    return methods.index(name) % COLOURS
