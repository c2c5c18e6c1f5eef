"""Counters of processes from /proc. A worker's children are counted with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and all its living descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:  # it has just ended
                continue
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of living processes so far, user and system."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def peak_rss_bytes(pids: Iterable[int]) -> int:
    """The sum of the processes' peak RSS. Mapped files count, and pages shared by two processes count twice."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def await_end(pids: Iterable[int], patience_s: float = 20.0) -> None:
    """Wait for processes that are ending, so that they disturb no measurement; kill those that do not end in time."""
    deadline = time.monotonic() + patience_s
    for pid in pids:
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_alive(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
