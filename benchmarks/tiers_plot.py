"""The plot of `benchmarks/tiers.py`: TTFT against the length of the prompt, a line for each source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


def plot(path: Path, model: str, facts: dict[str, Any]) -> None:
    """Write an SVG."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for source, by_length in facts["cells"].items():
        if by_length:
            lengths = sorted(by_length)
            axes.plot(lengths, [1e3 * by_length[n]["ttft_s"] for n in lengths], marker="o", label=source)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted(facts["cells"]["computed"]), [f"{n:,}" for n in sorted(facts["cells"]["computed"])])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("TTFT, ms")
    axes.set_title(f"{model}: TTFT by where the prompt's KV is found")
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
