"""The cores and the memory that this process may use, within the limits of its control groups (container, service)."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from twostroke.errors import InvalidRequest

MAX_THREADS_PER_CORE = 8  # threads per core: more would only wait for one another
NO_LIMIT = 1 << 60  # bytes; a group of cgroup v1 without a limit has one near 2 ** 63


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's group for a controller ("cpu", "memory") and of all its parent groups.

    A folder may be missing: a container often sees only a part of the tree, with its own group as the root.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):  # cgroup v2, or v1
                for mount in (controllers, "unified" if not controllers else controller):
                    group = root / "sys/fs/cgroup" / mount / path.lstrip("/")
                    yield from (group, *group.parents[: len(Path(path).parts) - 1])


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


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, and within the limits of the process's control groups.

    The page cache counts as available, also its active part: the system frees it when memory is needed. A checkpoint
    that was read twice is in it.
    """
    return max(0, min([machine_memory(root), *_left_by_groups(root)]))


def group_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the process's control groups still let it take; None if no group limits it.

    Beyond this the system ends the process, where a machine without memory only becomes slow at first.
    """
    left = min(_left_by_groups(root), default=NO_LIMIT)
    return None if left >= NO_LIMIT else max(0, left)


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, whatever control groups say."""
    with suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        if (found := lines.get("MemAvailable")) is not None:
            return int(found.split()[0]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # free memory only, without the page cache
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # macOS does not tell: assume half of it


def _left_by_groups(root: Path) -> Iterator[int]:
    """Limit minus use of the process's groups and their parents, if they have a limit."""
    for group in control_groups("memory", root):
        for limit in ("memory.max", "memory.high"):  # "max": no limit
            with suppress(OSError, ValueError):
                yield _number(group / limit) - _number(group / "memory.current") + _page_cache(group)
        with suppress(OSError, ValueError):  # cgroup v1; without a limit the number is near 2 ** 63
            used = _number(group / "memory.usage_in_bytes") - _page_cache(group, "total_")
            yield _number(group / "memory.limit_in_bytes") - used


def _number(path: Path) -> int:
    return int(path.read_text())


def _page_cache(group: Path, prefix: str = "") -> int:
    """Bytes of the group's page cache according to memory.stat, 0 if it does not say."""
    names = {f"{prefix}inactive_file", f"{prefix}active_file"}
    with suppress(OSError):
        lines = [line.partition(" ") for line in (group / "memory.stat").read_text().splitlines()]
        return sum(int(value) for name, _, value in lines if name in names)
    return 0
