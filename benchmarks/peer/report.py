"""The printed and the saved results: a Markdown table for each model and workload, and the raw numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peer.engines import ENGINES, OURS
from benchmarks.peer.figures import Rates, medians, ratio, together
from benchmarks.peer.turns import Measured, Workload
from benchmarks.peer.weights import describe
from benchmarks.quiet import doubt
from benchmarks.terminal import head, row

IDLE_LIMIT = 0.02  # cores that waiting workers may use; above it the comparison is in doubt

# Columns of figures that have a ratio; "total" is informative only if prefill and decode overlap.
COLUMNS: dict[str, Callable[[Rates], float | None]] = {
    "prefill tok/s": lambda one: one.prefill,
    "decode tok/s": lambda one: one.decode,
    "total tok/s": lambda one: one.total,
}


def table(model: str, workload: Workload, measurements: Sequence[Measured]) -> str:
    """A row for each measured engine, two rows of ratios, and a line for each engine that failed."""
    columns = [name for name in COLUMNS if name != "total tok/s" or workload.batch > 1]
    measured = {one.engine: medians(one.rounds) for one in measurements if one.turns}
    title = f"**{model}**, {workload.batch} x ({workload.prompt_tokens} + {workload.output_tokens}) tokens"
    lines = [
        title,
        "",
        head(["engine", "weights", *columns, "peak RSS MiB"], 2),
    ]
    for one in measurements:
        if one.engine in measured:
            cells = [number(COLUMNS[name](measured[one.engine])) for name in columns]
            peak = f"{one.peak_rss_bytes / 2**20:.0f}"
            lines.append(row([f"{one.engine} {one.version}", describe(ENGINES[one.engine], model), *cells, peak]))
    whole = {one.engine: together(one.rounds) for one in measurements if one.turns}
    for label, figures in ((f"{OURS} / best peer", measured), ("the same, all rounds together", whole)):
        lines.append(row([label, "", *(ratio_cell(name, figures) for name in columns), ""]))
    lines += [f"\n{one.engine}: {one.failure}" for one in measurements if one.failure]
    lines += [f"\n{one}" for one in doubts(measurements)]
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 200 else f"{value:.1f}"


def ratio_cell(column: str, measured: dict[str, Rates]) -> str:
    ours = ENGINES[OURS].adapter  # our other ways are no peers
    peers = {name: one for name, one in measured.items() if name == OURS or ENGINES[name].adapter != ours}
    found = ratio({name: COLUMNS[column](one) for name, one in peers.items()}, OURS)
    return "" if found is None else f"{found.value:.2f} ({found.peer})"


def doubts(measurements: Sequence[Measured]) -> list[str]:
    """Reasons to doubt the figures."""
    found = [
        f"Not idle: {one.engine} used {one.idle_cpu:.0%} of a core while others had their turns."
        for one in measurements
        if one.idle_cpu > IDLE_LIMIT
    ]
    return found + doubt([turn.others_cpu for one in measurements for turn in one.turns])[:1]


def record(model: str, workload: Workload, measurements: Sequence[Measured]) -> dict[str, Any]:
    """All numbers, for JSON."""
    return {
        "model": model,
        "workload": asdict(workload),
        "engines": [
            {
                "engine": one.engine,
                "version": one.version,
                "weights": describe(ENGINES[one.engine], model),
                "medians": asdict(medians(one.rounds)) if one.turns else None,
                "together": asdict(together(one.rounds)) if one.turns else None,
                "peak_rss_bytes": one.peak_rss_bytes,
                "load_s": one.load_s,
                "idle_cpu": one.idle_cpu,
                "failure": one.failure,
                "rounds": [asdict(turn) for turn in one.turns],
            }
            for one in measurements
        ],
    }
