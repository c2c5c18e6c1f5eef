"""The README's plot of speed, from raw results of `make bench-peers`.

    python -m benchmarks.plot_readme

This writes docs/images/speed.svg: tokens/s of every engine, prefill and decode, for one model on two machines. Text is
stored as text in the reader's sans-serif font. The colors are legible on light and dark pages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results_file import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = "qwen2.5-coder-0.5b"
MACHINES = (
    ("Xeon, Granite Rapids (AMX)", "peers-granite-rapids-2026-11-23.json"),
    ("EPYC, Zen 4 (AVX-512)", "peers-zen4-2026-11-25.json"),
)
ENGINES = {
    "twostroke": "Twostroke, GGUF 4-bit",
    "vllm": "vLLM, bfloat16",
    "openvino": "OpenVINO GenAI, int4",
    "openvino-int8": "OpenVINO, int8 activations",
    "llama.cpp": "llama.cpp, same GGUF",
}
STROKES = (("prefill", "prefill, tokens/s"), ("decode", "decode, tokens/s"))
OURS, OTHERS, TEXT = "#e8710a", "#8a94a3", "#6b7786"
OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "speed.svg"


def medians(file: str) -> dict[str, dict[str, float]]:
    """Each engine's medians over rounds: one sequence of 512 prompt tokens, 64 generated."""
    results: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())["results"]
    (found,) = [one for one in results if one["model"] == MODEL and one["workload"]["name"] == "single"]
    return {engine["engine"]: engine["medians"] for engine in found["engines"] if not engine["failure"]}


def bars(axes: Axes, speeds: dict[str, float]) -> None:
    """One bar for each engine, ours on top, each labelled with its value."""
    names = [name for name in reversed(ENGINES) if name in speeds]  # bars are drawn from the bottom up
    values = [speeds[name] for name in names]
    drawn = axes.barh(
        [ENGINES[name] for name in names], values, color=[OURS if name == "twostroke" else OTHERS for name in names]
    )
    axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=4, color=TEXT)
    axes.set_xlim(0, 1.18 * max(values))
    axes.set_xticks([])
    axes.tick_params(length=0, colors=TEXT)
    axes.spines[:].set_visible(False)


def main() -> None:
    argparse.ArgumentParser("plot_readme", description="Draw the README's plot of speed from raw results.").parse_args()

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "svg.hashsalt": "speed",
    }
    figure = Figure(figsize=(9.2, 4.3), layout="constrained")
    FigureCanvasSVG(figure)
    rows = figure.subplots(len(MACHINES), len(STROKES), sharey="row", gridspec_kw={"height_ratios": [5, 4]})
    for row, (machine, file) in zip(rows, MACHINES, strict=True):
        found = medians(file)
        for axes, (stroke, label) in zip(row, STROKES, strict=True):
            bars(axes, {engine: speeds[stroke] for engine, speeds in found.items()})
            axes.set_title(f"{machine}: {label}", color=TEXT, fontsize=10, loc="left")
    OUTPUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUTPUT, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
