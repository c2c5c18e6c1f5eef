"""What went in and out of a tier, and what did not."""

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class TierCounts:
    """A tier's counts at one moment. `reasons` says why pages were not taken or not written.

    Parts of snapshots are pages; `snapshots_in` and `snapshots_out` are whole ones.
    """

    pages_in: int
    bytes_in: int
    seconds_in: float
    pages_out: int
    bytes_out: int
    seconds_out: float
    hits: int
    misses: int
    reasons: dict[str, int]
    snapshots_in: int = 0
    snapshots_out: int = 0


class TierCounters:
    """Counts of one tier; any thread may add to them. "out" is away from the pool, "in" is back.

    Reasons that stores and the engine count:
        corrupt: pages deleted because they were not what they said; foreign: of another key or version;
        full: not written, no room; evicted: deleted to make room; second_touch: not written, seen once;
        near: parts of a snapshot that were not written, since computing from the one before it is quicker;
        budget: not written, the day's bytes are used up; queue: not written, too much was waiting;
        slow: not read, computing them was predicted to be quicker; late: not taken, since they had not come in time;
        error: the tier failed or did not answer; open: not asked, since it failed before (the circuit is open).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = {"in": 0.0, "out": 0.0}
        self._reasons: Counter[str] = Counter()

    def moved(self, direction: str, pages: int, size: int, seconds: float) -> None:
        """Count pages that moved, "in" or "out"."""
        with self._lock:
            self._counts[f"pages_{direction}"] += pages
            self._counts[f"bytes_{direction}"] += size
            self._seconds[direction] += seconds

    def snapshot(self, direction: str) -> None:
        """Count a snapshot all of whose parts have moved, "in" or "out"."""
        with self._lock:
            self._counts[f"snapshots_{direction}"] += 1

    def looked_up(self, hits: int, misses: int) -> None:
        """Count pages that a prompt found here, and those that it did not."""
        with self._lock:
            self._counts["hits"] += hits
            self._counts["misses"] += misses

    def skipped(self, reason: str, pages: int = 1) -> None:
        """Count pages that were not read or not written, and why."""
        if pages:
            with self._lock:
                self._reasons[reason] += pages

    def read(self) -> TierCounts:
        with self._lock:
            one = self._counts
            return TierCounts(
                one["pages_in"], one["bytes_in"], self._seconds["in"],
                one["pages_out"], one["bytes_out"], self._seconds["out"],
                one["hits"], one["misses"], dict(self._reasons), one["snapshots_in"], one["snapshots_out"],
            )  # fmt: skip
