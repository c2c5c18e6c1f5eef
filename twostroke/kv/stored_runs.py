"""Runs of a prompt's blocks, each where one store has it, and how many of them are loaded and not computed again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from twostroke.kv.tiers.speed import TransferSpeed
from twostroke.kv.tiers.store import Store

SLACK = 1.1  # a load may take this many times as long as computing the same pages


@dataclass(frozen=True)
class StoredRun:
    """Pages [start, stop) of a prompt, counted from the first one asked for, in one store.

    `snapshot`: they are parts of the snapshot behind its blocks, and are counted after them.
    """

    store: Store
    start: int
    stop: int
    snapshot: bool = False


def num_blocks(runs: Sequence[StoredRun]) -> int:
    """The number of blocks in runs that begin with the first one."""
    return max((run.stop for run in runs if not run.snapshot), default=0)


def pages_worth_loading(
    segments: Sequence[StoredRun],  # where the pages are
    computing: Callable[[int], float],  # predicted seconds to compute the first n of them
    speeds: Mapping[str, TransferSpeed],  # how fast each store answers, by tier
    page_bytes: int,  # bytes of a page
) -> int:
    """Returns how many of the leading pages to load: as many as save the most time, in whole segments.

    Where a snapshot is the last of them, all or none: blocks without the states behind them are of no use.
    """
    best, most_saved, loading = 0, 0.0, 0.0
    whole = bool(segments) and segments[-1].snapshot
    for segment in segments:
        loading += speeds[segment.store.tier].seconds((segment.stop - segment.start) * page_bytes)
        saved = computing(segment.stop) - loading
        if saved > most_saved and (not whole or segment.snapshot):
            best, most_saved = segment.stop, saved
    return best
