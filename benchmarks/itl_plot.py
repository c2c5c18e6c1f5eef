"""The plot of `benchmarks/itl.py`: p99 ITL against TTFT and against throughput, a point for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

Point = tuple[str, float | None, Mapping[str, float]]  # a policy's name, its objective in ms, its medians
PANELS = (("ttft_s", "TTFT of the long prompt, s"), ("tokens_per_second", "throughput, tokens/s"))


def plot(path: Path, title: str, points: Sequence[Point]) -> None:
    """Write an SVG. Fixed budgets are joined by a line; objectives are stars, each with a line at its target."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    figure.suptitle(f"{title}: ITL of the streams while the prompt is prefilled")
    points = sorted(points, key=lambda point: point[2]["itl_p99_s"])
    fixed = [point for point in points if point[1] is None]
    paced = [point for point in points if point[1] is not None]
    for axes, (name, label) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for marker, group, joined in (("o", fixed, "-"), ("*", paced, "")):
            x = [1e3 * medians["itl_p99_s"] for _, _, medians in group]
            y = [medians[name] for _, _, medians in group]
            axes.plot(x, y, marker=marker, linestyle=joined, markersize=12 if marker == "*" else 5)
            for (policy, _, _), where in zip(group, zip(x, y, strict=True), strict=True):
                axes.annotate(policy, where, textcoords="offset points", xytext=(6, 5), fontsize=8)
        for _, objective, _ in paced:
            if objective is not None:
                axes.axvline(objective, color="gray", linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.margins(x=0.2, y=0.15)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("p99 ITL, ms")
        axes.set_ylabel(label)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
