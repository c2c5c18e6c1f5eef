"""What a disk did not take or give: counted, told once, and left alone for a while."""

import logging
import time

from twostroke.kv.tiers.counters import TierCounters

log = logging.getLogger(__name__)

REST_S = 10.0  # seconds without writing after the disk was full, or failed


class DiskFailures:
    """The failures of one store.

    Attributes:
        failing: whether it failed since the last thing that was written or read.
        rest_until: when prompts' pages are written again, after a failure.
    """

    def __init__(self, where: str, counters: TierCounters) -> None:
        self._where, self._counters = where, counters
        self.failing, self.rest_until = False, 0.0
        self._told: set[str] = set()

    @property
    def resting(self) -> bool:
        return time.monotonic() < self.rest_until

    def rest(self) -> None:
        """Write nothing for a while."""
        self.rest_until = time.monotonic() + REST_S

    def refused(self, reason: str, pages: int) -> None:
        """Count pages for which there is no room, and say so: once for each day's budget, and once for a full disk."""
        self._counters.skipped(reason, pages)
        if reason == "budget":
            log.info(
                "%s: the day's budget of writes is used up: nothing more goes there until midnight (UTC)", self._where
            )
            return
        self.rest()
        self.failing = True
        self._tell("is full, and has too few pages that may go: nothing is written there for now")

    def failed(self, error: OSError, pages: int, told: bool) -> None:
        """Count a failure of the disk, and say each kind once, unless all of it was told."""
        self._counters.skipped("error", pages)
        self.failing = True
        if not told:
            self._tell(f"does not work: {error.strerror or error}; pages are computed instead")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s %s", self._where, text)
