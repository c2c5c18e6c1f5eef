"""Runs of a prompt's blocks, each where one store has it."""

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.kv.tiers.store import Store


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
