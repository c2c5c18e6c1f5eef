"""Threads for reading and writing outside of the pool, so that a step never waits for a disk or a network."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from twostroke.system.interrupts import DeferredInterrupts, Monitor

log = logging.getLogger(__name__)


class DaemonThreads:
    """Daemon threads that run jobs in order. They start with the first job.

    A job that never returns keeps one thread, and does not keep the process from ending.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = Monitor()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._closed = False

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job soon. After `close` it is dropped."""
        with DeferredInterrupts(), self._changed.lock:
            if self._closed:
                return
            self._jobs.append(job)
            if self._busy + len(self._jobs) > len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return len(self._jobs)

    def settle(self, limit_s: float) -> bool:
        """Wait until every job has ended, at most `limit_s` seconds. Returns whether they have."""
        return self._changed.wait_for(lambda: not self._jobs and not self._busy, limit_s)

    def close(self, limit_s: float) -> bool:
        """Drop the jobs that have not begun, and wait for the others. Returns whether all threads have ended."""
        with DeferredInterrupts(), self._changed.lock:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        until = time.monotonic() + limit_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
            with self._changed.lock:
                if not self._jobs:
                    if self._closed:
                        return
                    continue  # another thread has it
                job = self._jobs.popleft()
                self._busy += 1
            try:
                job()
            except Exception:  # an error of one job must not end the thread
                log.exception("a job of the thread %s failed", self._name)
            finally:
                job = None  # it may hold pages
                with self._changed.lock:
                    self._busy -= 1
                    self._changed.notify_all()
