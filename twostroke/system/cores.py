"""How many threads to compute with."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from twostroke.errors import InvalidRequest
from twostroke.system.groups import control_groups

MOST = 8  # threads for each core: more do nothing but wait for one another


def count_threads(threads: int | None) -> int:
    """`threads`, or with None one for each core that this process may use. Raises InvalidRequest."""
    cores = usable_cores()
    if threads is None:
        return cores
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST * cores:
        raise InvalidRequest(f"threads must be from 1 to {MOST * cores} with {cores} cores, not {threads!r}")
    return threads


def usable_cores(root: Path = Path("/")) -> int:
    """Those of this process's affinity, and no more than its control groups (a container's, a service's) allow the
    time of: threads beyond that are stopped together for a part of every tenth of a second."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for group in control_groups("cpu", root) for quota in _quota(group))
    return max(1, int(min([cores, *quotas])))


def _quota(group: Path) -> Iterator[float]:
    """Processor time over time that a group allows, where it says."""
    with suppress(OSError, ValueError):  # "max": none
        quota, period = (group / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with suppress(OSError):
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0:  # -1: none
            yield quota / period
