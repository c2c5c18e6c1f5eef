"""The roofline of both strokes, from the JSON of benchmarks/gpu/strokes.py (or seeds.py).

python3 -m benchmarks.gpu.roofline_plot strokes.json --out roofline.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"prefill": "#e8710a", "decode": "#1a73e8"}
MARKERS = "osD^vP"


def points(files: Sequence[Path]) -> tuple[dict[str, float], list[dict[str, Any]], str]:
    """The ceilings of the first file, the timed cases of all, and the card's name. Raises SystemExit."""
    loaded = [json.loads(file.read_text()) for file in files]
    found = [case for one in loaded for case in one["cases"] if "step_ms" in case and "stroke" in case]
    if not found:
        raise SystemExit(f"error: {files[0]}: there are no timed steps in it")
    return loaded[0]["ceilings"], found, loaded[0]["machine"]["gpu"] or loaded[0]["machine"]["cpu"]


def draw(axes: Axes, ceilings: dict[str, float], found: Sequence[dict[str, Any]]) -> None:
    """The two ceilings, and a point for each case: its intensity, and the FLOP/s that its step reaches."""
    bandwidth, flops = ceilings["bandwidth"], ceilings["flops"]
    balance = flops / bandwidth
    ends = [min(0.5, *(one["intensity"] for one in found)), 3 * max(2 * balance, *(one["intensity"] for one in found))]
    axes.plot([ends[0], balance, ends[1]], [ends[0] * bandwidth / 1e12, flops / 1e12, flops / 1e12], color="#6b7786")
    axes.axvline(balance, color="#6b7786", linewidth=0.8, linestyle=":")
    axes.annotate(f"copy {bandwidth / 1e12:.2f} TB/s", (ends[0], ends[0] * bandwidth / 1e12), fontsize=8,
                  textcoords="offset points", xytext=(20, 40))  # fmt: skip
    axes.annotate(f"matmul {flops / 1e12:,.0f} TFLOP/s; balance {balance:,.0f} FLOPs/byte", (balance, flops / 1e12),
                  fontsize=8, textcoords="offset points", xytext=(-40, 6), ha="right")  # fmt: skip
    models = list(dict.fromkeys(one["model"] for one in found))
    for model in models:
        for stroke, color in COLORS.items():
            mine = [one for one in found if one["model"] == model and one["stroke"] == stroke]
            if mine:
                axes.plot([one["intensity"] for one in mine], [one["flops_per_second"] / 1e12 for one in mine],
                          linestyle="", marker=MARKERS[models.index(model) % len(MARKERS)], color=color, markersize=5,
                          label=f"{model}, {stroke}")  # fmt: skip
                for one in mine:
                    axes.annotate(f"{one['label']}: {one['of_floor']:.0%}", fontsize=6, textcoords="offset points",
                                  xy=(one["intensity"], one["flops_per_second"] / 1e12), xytext=(6, -4))  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("intensity, FLOPs / byte of weights and KV")
    axes.set_ylabel("TFLOP/s of a step")
    axes.legend(fontsize=8, loc="lower right")


def main() -> None:
    made = argparse.ArgumentParser("roofline_plot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("results", type=Path, nargs="+", help="JSON files of one card")
    made.add_argument("--out", type=Path, help="SVG (default: beside the first file)")
    options = made.parse_args()
    ceilings, found, card = points(options.results)

    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasSVG(figure)
    figure.suptitle(f"Both strokes on {card}: share of the floor at each point")
    draw(figure.add_subplot(), ceilings, found)
    path = options.out or options.results[0].with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})
    print(path)


if __name__ == "__main__":
    main()
