"""The number of threads to compute with."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from twostroke.errors import InvalidRequest
from twostroke.system.cgroups import control_groups

MAX_THREADS_PER_CORE = 8  # threads per core: more would only wait for one another


def count_threads(threads: int | None) -> int:
    """`threads`, or one for each core that this process may use if it is None. Raises InvalidRequest."""
    cores = usable_cores()
    if threads is None:
        return cores
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS_PER_CORE * cores:
        raise InvalidRequest(
            f"threads must be from 1 to {MAX_THREADS_PER_CORE * cores} with {cores} cores, not {threads!r}"
        )
    return threads


def usable_cores(root: Path = Path("/")) -> int:
    """The cores in this process's affinity mask, limited by the CPU quota of its control groups (container, service).

    With more threads than the quota, the system would stop all of them for a part of every tenth of a second.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for group in control_groups("cpu", root) for quota in _quota(group))
    return max(1, int(min([cores, *quotas])))


def _quota(group: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):  # "max": no limit
        quota, period = (group / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with suppress(OSError):
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0:  # -1: no limit
            yield quota / period
