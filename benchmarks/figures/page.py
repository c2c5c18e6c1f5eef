"""The page: a table for each source."""

# ruff: noqa: E501  (a paragraph of the page is one line)
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.figures.row import Row
from benchmarks.figures.source_001 import source_001
from benchmarks.figures.source_002 import source_002
from benchmarks.figures.source_004 import source_004

PAGE = Path(__file__).parents[2] / "docs" / "results" / "figures-of-the-sources.md"
HEAD = """# The figures of the sources, derived again

Which figures of the texts that this project was built from hold? `python -m benchmarks.figures` writes this page. Every number of "ours" is computed from sizes of models and peaks of machines (`twostroke/study/plan/data`), with the code of `twostroke plan`; a test compares the page with what the program writes.

"Floor" is the larger of FLOPs at the dense peak and weight bytes at the full bandwidth, on as many cards as stated: no program can be quicker. "Impossible" is a time below its floor. KV and weights are of 16 bits, as in the sources. FLOPs of scores are causal unless it says full.

**In short.** KV sizes are mostly right. Prefill times in 002 and 004 are below the floor in every row, on cards that cannot hold the weights. FLOPs are 2.8 to 12 times off, some too low and some too high. Ratios such as 171, 15 and 69 are right divisions, often of impossible times.
"""

SOURCES: tuple[tuple[str, Callable[[], Iterable[Row]]], ...] = (
    ('001: "The KV Cache: How It Eliminates Redundancy", January 2026', source_001),
    ("002: on prefill, its optimization and TTFT, for Llama 70B on A100s", source_002),
    ('004: "Prefill in LLM Inference" and "Decode in LLM Inference", for Llama 3 70B on H100s', source_004),
)


def page() -> str:
    """All tables."""
    parts = [HEAD]
    for title, rows in SOURCES:
        parts.append(f"\n## {title}\n\n| item | theirs | ours | verdict |\n|---|--:|--:|---|\n")
        parts += [f"| {row.item} | {row.theirs} | {row.ours} | {row.verdict} |\n" for row in rows()]
    return "".join(parts)
