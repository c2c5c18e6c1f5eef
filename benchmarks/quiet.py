"""The load of other processes on the machine during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer.report import OTHERS_LIMIT
from twostroke.system.machine import busy_seconds

ROUNDING_S = 4 / os.sysconf("SC_CLK_TCK")  # the system counts in ticks, for each core and each process


def own_seconds() -> float:
    """Processor time of this process and of those that it started, such as other ranks."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for thread in Path("/proc/self/task").iterdir():
        for child in (thread / "children").read_text().split():
            fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


class Others:
    """The processor time of everything else on the machine, from now on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._theirs = busy_seconds() - own_seconds()

    @property
    def cpu(self) -> float:
        """Processor time so far per second of wall time: 1 is a whole core."""
        theirs = busy_seconds() - own_seconds() - self._theirs - ROUNDING_S  # a short turn is within it
        return max(0.0, theirs) / (time.perf_counter() - self._began)


def doubt(cpus: Sequence[float]) -> list[str]:
    """A warning line if turns were not quiet, from the values that `Others` measured in each."""
    crowded = [cpu for cpu in cpus if cpu > OTHERS_LIMIT]
    if not crowded:
        return []
    worst = f"other processes took up to {max(crowded):.0%} of a core"
    return [f"Not quiet: in {len(crowded)} of {len(cpus)} turns {worst}.", ""]
