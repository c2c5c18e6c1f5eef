"""Figures from the times of tokens: rates, medians over rounds, and ratios. Pure functions.

Rates are of all sequences of a workload together. Unlike in `twostroke.study.bench.latency`, decode is timed from the
moment when all sequences have their first token: some engines decode some sequences while they prefill others, and
this must not shift time from prefill to decode. The total includes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean, median

from benchmarks.quiet import OTHERS_CPU

DEFINITIONS = {
    "prefill_s": "first token of the last sequence to get one - start; the engine is given token ids",
    "prefill": "prompt tokens / prefill_s",
    "decode": "tokens that came after start + prefill_s / (last token - start - prefill_s)",
    "total": "prompt and output tokens / (last token - start)",
    "peak_rss_bytes": "VmHWM of the worker and its children, added up; loading and files mapped in are part of it",
    "together": "all tokens of all rounds / all their time; a median jumps where rounds are either quick or slow",
    "ratio": "ours / the best peer's, of medians and of all rounds together, the best peer chosen for each column",
    "idle_cpu": "processor time / wall time of the worker while other workers had their turns",
    **OTHERS_CPU,
}


@dataclass(frozen=True)
class Rates:
    """Tokens per second; decode is None if no token came after the last first token."""

    prefill_s: float
    prefill: float
    decode: float | None
    total: float


def rates(prompt_tokens: int, times: Sequence[Sequence[float]]) -> Rates:
    """The rates of one turn. `times` has the arrival of each token of each sequence, in seconds since the start."""
    prefill_s, last = max(one[0] for one in times), max(one[-1] for one in times)
    outputs, prompts = sum(map(len, times)), prompt_tokens * len(times)
    decoded = sum(at > prefill_s for one in times for at in one)
    return Rates(
        prefill_s=prefill_s,
        prefill=prompts / prefill_s,
        decode=decoded / (last - prefill_s) if decoded else None,
        total=(prompts + outputs) / last,
    )


def medians(rounds: Sequence[Rates]) -> Rates:
    """The median of each figure."""
    return _averages(rounds, median, median)


def together(rounds: Sequence[Rates]) -> Rates:
    """All tokens of all rounds over their total time; every round has the same number of tokens."""
    return _averages(rounds, fmean, harmonic_mean)


Average = Callable[[Sequence[float]], float]


def _averages(rounds: Sequence[Rates], of_times: Average, of_rates: Average) -> Rates:
    decodes = [one.decode for one in rounds if one.decode is not None]
    return Rates(
        prefill_s=of_times([one.prefill_s for one in rounds]),
        prefill=of_rates([one.prefill for one in rounds]),
        decode=of_rates(decodes) if decodes else None,
        total=of_rates([one.total for one in rounds]),
    )


@dataclass(frozen=True)
class Ratio:
    """The ratio of ours to the best peer's."""

    value: float
    peer: str


def ratio(figures: dict[str, float | None], ours: str) -> Ratio | None:
    """The ratio from `figures` by engine, larger is better. None if ours or those of all peers are missing."""
    mine = figures.get(ours)
    peers = {name: figure for name, figure in figures.items() if name != ours and figure is not None}
    if mine is None or not peers:
        return None
    best = max(peers, key=lambda name: peers[name])
    return Ratio(mine / peers[best], best)


def turn_order(engines: Sequence[str], round_number: int) -> list[str]:
    """The order of a round. Each begins with another engine, so that heat and caches do not always affect the same."""
    start = round_number % len(engines) if engines else 0
    return [*engines[start:], *engines[:start]]
