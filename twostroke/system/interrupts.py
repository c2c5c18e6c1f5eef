"""Ctrl-C at a safe point, and a lock and waits that it does not leave held.

Python raises KeyboardInterrupt between any two lines of the main thread.
"""

import _signal  # pyright: ignore[reportMissingImports]  # `signal` makes enumerations of all it gets: ten times as long
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PATIENCE_S = 1.0
SIGINT = int(signal.SIGINT)


class DeferredInterrupts:
    """A block of code that Ctrl-C does not cut in two: its handler runs when the outermost such block has ended.

    Another Ctrl-C, `PATIENCE_S` or more after the first, does not wait, so that code without end can be stopped.
    Outside the main thread, which alone gets signals, and where SIGINT has no handler in Python, this does nothing.
    """

    def __init__(self) -> None:
        # whether another Ctrl-C waits too. A block sets it where only short code is left that must not be cut. In a
        # block within another one it has no effect.
        self.final = False
        self._before: Any = None  # the handler to put back
        self._noted: float | None = None  # when the signal came

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        before = _signal.getsignal(SIGINT)
        if callable(before) and not isinstance(before, DeferredInterrupts):
            self._before = before
            _signal.signal(SIGINT, self)
        return self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler within the block."""
        if self._noted is None:
            self._noted = time.monotonic()
        elif frame is not None and frame.f_code in (
            DeferredInterrupts.__enter__.__code__,
            DeferredInterrupts.__exit__.__code__,
        ):
            return  # else the handler before would not be put back
        elif not self.final and time.monotonic() - self._noted >= PATIENCE_S:
            self._noted = None
            self._before(number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        if _signal.getsignal(SIGINT) is self:  # else the block has set another one
            _signal.signal(SIGINT, self._before)
        if self._noted is not None:
            self._noted = None
            self._before(SIGINT, None)


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: `function` runs within `DeferredInterrupts`. What it has taken is in its result, or given back."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with DeferredInterrupts():
            return function(*args, **kwargs)

    return call


class Monitor:
    """What `threading.Condition` is, for threads of which one may be the main thread.

    The methods of a Condition, and of Event, Semaphore and Future, which are made of one, are Python. KeyboardInterrupt
    may come when `__enter__` has taken the lock and has not returned, or before `__exit__` gives it back, and the lock
    stays held for ever. `with` on a plain lock is safe up to CPython 3.13, which looks for signals after calls, at the
    start of a function and at the end of a loop's body, so never between the lock and the block. CPython 3.14 may look
    there (python/cpython#148874), so the lock is taken with Ctrl-C postponed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards what is waited for: `with DeferredInterrupts(), monitor.lock:`
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
