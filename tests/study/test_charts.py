"""Charts: where values lie, which ticks an axis has, and what is drawn for them."""

import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.study.charts import (
    HEIGHT,
    NAMES,
    VALUES,
    Axis,
    Interval,
    Series,
    horizontal,
    interval_chart,
    line_chart,
    vertical,
)

LINEAR, LOGARITHMIC = Axis("x", "{:g}".format, logarithmic=False), Axis("x", "{:g}".format)
CLIPPED = Axis("x", "{:g}".format, max_decades=3)


@pytest.mark.parametrize(
    ("axis", "values", "ends"),
    [
        (LINEAR, [1.0, 20.0], (0.0, 21.0)),  # from 0, and a twentieth more than the largest
        (LINEAR, [-4.0, 20.0], (-4.0, 21.0)),
        (LINEAR, [-4.0, 0.0], (-4.0, 1.0)),  # an axis has an extent
        (Axis("x", str, logarithmic=False, top=1.0), [0.2, 0.4], (0.0, 1.0)),
        (LOGARITHMIC, [2.0, 300.0], (2.0, 300.0)),
        (LOGARITHMIC, [3.0, 3.0], (1.5, 6.0)),  # four times apart at least
        (CLIPPED, [0.02, 3.0], (0.01, 10.0)),  # whole decades
        (CLIPPED, [0.0, 1e-9, 3.0], (0.01, 10.0)),  # three of them at most
    ],
)
def test_ends(axis: Axis, values: list[float], ends: tuple[float, float]) -> None:
    assert axis.ends(values) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("axis", "ends", "ticks"),
    [
        (LINEAR, (0.0, 21.0), [0, 5, 10, 15, 20]),
        (LINEAR, (-4.0, 21.0), [0, 5, 10, 15, 20]),
        (LINEAR, (-6.0, 21.0), [0, 10, 20]),
        (LOGARITHMIC, (1.0, 1000.0), [1, 10, 100, 1000]),
        (LOGARITHMIC, (2.0, 40.0), [2, 5, 10, 20]),
        (CLIPPED, (0.01, 10.0), [0.01, 0.1, 1, 10]),
    ],
)
def test_ticks(axis: Axis, ends: tuple[float, float], ticks: list[float]) -> None:
    assert axis.ticks(ends) == pytest.approx(ticks)


@given(st.floats(1e-6, 1e6), st.floats(1.1, 1e6), st.floats(0, 1))
def test_a_value_lies_at_its_part_of_the_axis(low: float, ratio: float, part: float) -> None:
    """Equal ratios take equal room on a logarithmic axis, and equal differences on a linear one."""
    ends = low, low * ratio
    assert LOGARITHMIC.place(low * ratio**part, ends) == pytest.approx(part, abs=1e-6)
    assert LINEAR.place(low + (ends[1] - low) * part, ends) == pytest.approx(part, abs=1e-6)


def test_what_lies_below_the_last_decade_is_shown_at_it() -> None:
    ends = CLIPPED.ends([0.0, 3.0, 1e-9])
    assert CLIPPED.place(0.0, ends) == CLIPPED.place(0.001, ends) == 0
    assert [CLIPPED.label(tick, ends) for tick in CLIPPED.ticks(ends)] == ["≤ 0.01", "0.1", "1", "10"]
    assert LINEAR.label(0.0, (0.0, 1.0)) == "0"


def test_lines_over_all_points() -> None:
    series = [Series("a", [(1, 5), (3, 2)], 0), Series("b", [(2, 9)], 1)]
    assert horizontal("h", 4, series, 3) == Series("h", [(1, 4), (3, 4)], 3, dashed=True)
    assert vertical("v", 4, series, 3) == Series("v", [(4, 2), (4, 9)], 3, dashed=True)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_what_a_line_chart_draws() -> None:
    """A line and a circle a point, a band around it, points alone with labels, and a dashed line without circles."""
    series = [
        Series("line", [(0, 1), (10, 2)], 0),
        Series("band", [(0, 3), (10, 4)], 1, band=[(2, 4), (3, 5)]),
        Series("dots", [(5, 2)], 2, dots=["five"]),
        Series("limit", [(0, 5), (10, 5)], 3, dashed=True),
    ]
    drawn = parse(line_chart("T", LINEAR, LINEAR, series))
    assert [one.attrib["class"] for one in drawn.iter("polyline")] == ["s0", "s1", "s3 dashed"]
    assert [one.attrib["class"] for one in drawn.iter("polygon")] == ["f1"]
    told = [one.text for circle in drawn.iter("circle") for one in circle.findall("title")]
    assert told == ["line: 1 at 0", "line: 2 at 10", "dots, five: 2 at 5"]
    assert {"line", "band", "dots", "limit"} <= {one.text for one in drawn.iter("text")}
    (band,) = drawn.iter("polygon")
    ups = [float(point.split(",")[1]) for point in band.attrib["points"].split()]
    line = [float(point.split(",")[1]) for point in list(drawn.iter("polyline"))[1].attrib["points"].split()]
    assert ups[0] < line[0] < ups[3]  # upper bounds first, then the lower ones back: upwards is less
    assert ups[1] < line[1] < ups[2]
    assert max(ups) < HEIGHT


def test_long_legends_go_on_in_another_row() -> None:
    names = ["a name that is rather long"] * 6
    texts = list(parse(line_chart("T", LINEAR, LINEAR, [Series(name, [(1, 1)], 0) for name in names])).iter("text"))
    rows = {one.attrib["y"] for one in texts if one.text in names}
    assert len(rows) == math.ceil(6 / 2)


def test_an_interval_lies_between_its_bounds() -> None:
    width = NAMES + 100 + VALUES
    groups = [("g", [Interval("a", 0, (0.25, 0.5, 1.0), "50%"), Interval("none", 1, None)])]
    drawn = parse(interval_chart(Axis("", "{:.0%}".format, logarithmic=False, top=1.0), groups, width))
    (line,) = [one for one in drawn.iter("line") if one.attrib["class"] == "s0"]
    assert (float(line.attrib["x1"]), float(line.attrib["x2"])) == (NAMES + 25, NAMES + 100)
    (dot,) = drawn.iter("circle")
    assert float(dot.attrib["cx"]) == NAMES + 50
    assert [one.text for one in drawn.iter("text")][-4:] == ["g", "a", "50%", "none"]


def test_axes_have_titles_and_say_where_they_are_logarithmic() -> None:
    drawn = parse(
        line_chart("T", Axis("tokens", str), Axis("memory", str, logarithmic=False), [Series("s", [(1, 1)], 0)])
    )
    texts = [one.text for one in drawn.iter("text")]
    assert "tokens (log)" in texts
    assert "memory" in texts


def test_labels_of_ticks_do_not_overlap() -> None:
    """Long labels are left out where they would lie on the one before."""
    x = Axis("x", lambda value: f"{value:,.0f} requests a second", logarithmic=False)
    drawn = parse(line_chart("T", x, LINEAR, [Series("s", [(0, 1), (100, 2)], 0)]))
    labels = sorted(float(one.attrib["x"]) for one in drawn.iter("text") if "requests" in (one.text or ""))
    assert len(labels) > 1
    width = 6.3 * len("20 requests a second")
    assert all(after - before >= width for before, after in pairwise(labels))
