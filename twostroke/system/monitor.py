"""A lock, and waiting for what others do under it, that Ctrl-C does not leave held."""

import threading
import time
from collections.abc import Callable

from twostroke.system.interrupts import DeferredInterrupts


class Monitor:
    """What `threading.Condition` is, for threads of which one may be the main thread.

    The methods of a Condition, and of Event, Semaphore and Future, which are made of one, are Python. KeyboardInterrupt
    may come when `__enter__` has taken the lock and has not returned, or before `__exit__` gives it back, and the lock
    stays held for ever. `with` on a plain lock is safe up to CPython 3.13, which looks for signals after calls, at the
    start of a function and at the end of a loop's body, so never between the lock and the block. CPython 3.14 may look
    there (python/cpython#148874), so the lock is taken with Ctrl-C postponed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards what is waited for: `with Postponed(), monitor.lock:`
        self._gates: list[threading.Lock] = []  # one for each thread that waits, held until there is news

    def notify_all(self) -> None:
        """Wake all who wait. The caller holds the lock and has postponed Ctrl-C, since nobody may be left out."""
        while self._gates:
            self._gates.pop().release()

    def wait_unless(self, unless: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait for the next `tell`, at most `limit_s` seconds, unless `unless()`, which is called with the lock held.

        Returns what `unless` has returned. Ctrl-C ends the wait.
        """
        with DeferredInterrupts(), self.lock:
            if unless():
                return True
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
        try:
            gate.acquire(timeout=-1 if limit_s is None else max(0.0, limit_s))
        finally:
            with DeferredInterrupts(), self.lock:
                if gate in self._gates:
                    self._gates.remove(gate)
        return False

    def wait_for(self, ready: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until `ready()`, which is called with the lock held, at most `limit_s` seconds.

        Returns what `ready` has returned last.
        """
        end = None if limit_s is None else time.monotonic() + limit_s
        left = limit_s
        while not self.wait_unless(ready, left):
            if left is not None and left <= 0:
                return False
            left = None if end is None else end - time.monotonic()
        return True
