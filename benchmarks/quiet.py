"""The load of other processes on the machine during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from benchmarks.peer.processes import TICKS, cpu_seconds, tree
from twostroke.system.machine import busy_seconds

LIMIT = 0.10  # cores that others may use; above it a comparison is in doubt
ROUNDING_S = 4 / TICKS  # the system counts in ticks, for each core and each process
OTHERS_CPU = {  # for the definitions of a benchmark's results
    "others_cpu": "processor time of everything else on the machine during the turn / wall time; 1 is a whole core"
}


def own_seconds() -> float:
    """Processor time of this process and of those that it started, such as other ranks."""
    ended = os.times()
    living = cpu_seconds(tree(os.getpid())[1:])
    return time.process_time() + ended.children_user + ended.children_system + living


class Others:
    """The processor time of everything else on the machine, from now on."""

    def __init__(self, own: Callable[[], float] = own_seconds) -> None:
        """`own`: the processor time so far of what is measured, in seconds."""
        self._began, self._own = time.perf_counter(), own
        self._theirs = busy_seconds() - own()

    @property
    def cpu(self) -> float:
        """Processor time so far per second of wall time: 1 is a whole core."""
        theirs = busy_seconds() - self._own() - self._theirs - ROUNDING_S  # a short turn is within it
        return max(0.0, theirs) / (time.perf_counter() - self._began)


def doubt(cpus: Sequence[float]) -> list[str]:
    """A warning line if turns were not quiet, from the values that `Others` measured in each."""
    crowded = [cpu for cpu in cpus if cpu > LIMIT]
    if not crowded:
        return []
    worst = f"other processes took up to {max(crowded):.0%} of a core"
    return [f"Not quiet: in {len(crowded)} of {len(cpus)} turns {worst}.", ""]
