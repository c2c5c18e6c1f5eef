"""The README's plot of speed, from raw results of `make bench-peers`.

    python -m benchmarks.plot_readme

This writes docs/images/speed.svg: tokens/s of every engine, prefill and decode, for one model on two machines. The
colors are legible on light and dark pages.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS
from benchmarks.terminal import command_line

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
STROKES = ("prefill", "decode")
OURS, OTHERS, TEXT = "#e8710a", "#8a94a3", "#6b7786"
NAMES, WIDTH, LONGEST, ROW, BAR, GAP = 200, 350, 290, 38, 30, 40  # pixels: names, a plot, its longest bar, rows
OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "speed.svg"


def medians(file: str) -> dict[str, dict[str, float]]:
    """Each engine's medians over rounds, ours first: one sequence of 512 prompt tokens, 64 generated."""
    results: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())["results"]
    (found,) = [one for one in results if one["model"] == MODEL and one["workload"]["name"] == "single"]
    known = {engine["engine"]: engine["medians"] for engine in found["engines"] if not engine["failure"]}
    return {name: known[name] for name in ENGINES if name in known}


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def plots(machine: str, found: dict[str, dict[str, float]], top: float) -> Iterator[str]:
    """Of one machine: names of engines, and a plot for each stroke, whose bars tell their values."""
    middle = ROW / 2 + 5
    for row, name in enumerate(found):
        yield text(NAMES - 5, top + row * ROW + middle, ENGINES[name], "end")
    for column, stroke in enumerate(STROKES):
        left, most = NAMES + column * WIDTH, max(one[stroke] for one in found.values())
        yield text(left, top - 10, f"{machine}: {stroke}, tokens/s")
        for row, (name, speeds) in enumerate(found.items()):
            length, at = LONGEST * speeds[stroke] / most, top + row * ROW
            place = f'x="{left}" y="{at + (ROW - BAR) / 2:.0f}" width="{length:.1f}" height="{BAR}"'
            yield f'<rect {place} fill="{OURS if name == "twostroke" else OTHERS}"/>'
            yield text(left + length + 6, at + middle, f"{speeds[stroke]:,.0f}")


def main() -> None:
    command_line(__doc__).parse_args()
    parts, top = list[str](), GAP - ROW / 4
    for machine, file in MACHINES:
        found = medians(file)
        parts += plots(machine, found, top)
        top += len(found) * ROW + GAP
    width, height = NAMES + len(STROKES) * WIDTH, round(top - GAP + ROW / 4)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = f'font-family="sans-serif" font-size="13" fill="{TEXT}"'
    OUTPUT.write_text("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>\n"]))


if __name__ == "__main__":
    main()
