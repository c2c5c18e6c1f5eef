"""Tells an engine's process that hangs from one that is slow."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


def major_faults(pid: int) -> int:
    """How often a process has waited for a page from disk (proc(5)); 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return 0


class Watchdog:
    """Counts the time in which a process could have made a step and has made none.

    A long step is none of its business below the limit. Time in which this process stood still as well (a container
    that was frozen, a machine that swaps) does not count, nor does time in which the other one reads pages from disk:
    it moves.
    """

    def __init__(
        self, limit_s: float, clock: Callable[[], float] = time.monotonic, faults: Callable[[int], int] = major_faults
    ) -> None:
        """`limit_s`: seconds without a step, above which a process hangs; 0 for no limit."""
        self.limit_s, self._clock, self._faults = limit_s, clock, faults
        self.look_s = min(5.0, max(0.1, limit_s / 10)) if limit_s else 60.0  # between two looks
        self._counted_s, self._looked, self._seen = 0.0, clock(), 0

    def hangs(self, pid: int, step_age_s: float) -> bool:
        """To be asked every `look_s` seconds; `step_age_s`: since the process was last between two steps."""
        now, faults = self._clock(), self._faults(pid)
        passed, moved = min(now - self._looked, 2 * self.look_s), faults != self._seen
        self._looked, self._seen = now, faults
        if step_age_s < 2 * self.look_s + 1.0:  # at rest it looks about every second
            self._counted_s = 0.0
        elif not moved:
            self._counted_s += passed
        if not self.limit_s or self._counted_s < self.limit_s:
            return False
        log.error("the engine's process %d made no step for %g s: it is killed", pid, self.limit_s)
        self._counted_s = 0.0
        return True
