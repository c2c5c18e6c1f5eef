"""Pages that wait to be written to a store: bounded in bytes, in order, written by a thread of the store's own."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from twostroke.kv.tiers.counters import TierCounters
from twostroke.system.daemon_threads import DaemonThreads

MAX_BYTES = 4 << 30
MAX_JOBS = 1000


class PageWrite(Protocol):
    """Pages to write, of `size` bytes in all. Their bytes are not in it, but are looked up when they are written."""

    size: int
    pages: int

    def write(self) -> None: ...

    def drop(self) -> None:
        """Called at the end, written or not."""
        ...


class WriteQueue:
    """Writes parcels in order. What exceeds its bound is dropped and counted."""

    def __init__(self, name: str, counters: TierCounters, most_bytes: int = MAX_BYTES) -> None:
        self._counters, self._most = counters, most_bytes
        self._waiting: deque[PageWrite] = deque()
        self._lock = threading.Lock()
        self.size = 0  # bytes that wait
        self._worker = DaemonThreads(f"{name} writer", 1)

    def push(self, write: PageWrite) -> None:
        """Queue a parcel, or drop it if there is no room."""
        with self._lock:
            full = self.size + write.size > self._most
            if not full:
                self._waiting.append(write)
                self.size += write.size
        if full:
            self._counters.skipped("queue", write.pages)
            write.drop()
        else:
            self._worker.submit(self._write)

    def run(self, job: Callable[[], object]) -> None:
        """Call the store with something else, after all that waits now; or not, if too much waits."""
        if self._worker.num_waiting < MAX_JOBS:
            self._worker.submit(job)

    def settle(self, limit_s: float) -> bool:
        """Wait until all is written, at most `limit_s` seconds."""
        return self._worker.settle(limit_s)

    def close(self, limit_s: float) -> bool:
        """Write what waits within `limit_s` seconds, and drop the rest."""
        until = time.monotonic() + limit_s
        self.settle(limit_s)
        with self._lock:
            left, self._waiting = list(self._waiting), deque()
            self.size = 0
        for write in left:
            self._counters.skipped("queue", write.pages)
            write.drop()
        return self._worker.close(max(0.1, until - time.monotonic()))

    def _write(self) -> None:
        with self._lock:
            if not self._waiting:  # dropped by `close`
                return
            write = self._waiting.popleft()
            self.size -= write.size
        try:
            write.write()
        finally:
            write.drop()
