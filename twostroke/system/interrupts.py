"""Ctrl-C at a safe point: Python raises KeyboardInterrupt between any two lines of the main thread."""

import _signal  # pyright: ignore[reportMissingImports]  # `signal` makes enumerations of all it gets: ten times as long
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

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
