"""A circuit breaker: what fails again and again is not asked for a while.

*Closed*, every call may go. Failures open it. *Open*, none may, until some seconds have passed; then one call goes as a
*probe*, which closes it, or opens it for twice as long. Source: M. Nygard, Release It!, 2007, chapter 5.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable

IN_A_ROW = 5  # failures that open it
WINDOW = 20  # calls of which half may not fail
MIN_OPEN_S = 1.0
MAX_OPEN_S = 30.0


class CircuitBreaker:
    """Decides whether calls may go, from how earlier ones ended. Any thread may use it.

    Each call that may go gets a *ticket*, and tells with it how it ended. A call that began before the last change of
    state has no say.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random) -> None:
        """`clock` gives seconds; `draw` gives random numbers in [0, 1)."""
        self._clock, self._draw = clock, draw
        self._lock = threading.Lock()
        self._era = 0  # counts changes of state
        self._until: float | None = None  # when a probe may go; None: closed
        self._probing = False
        self._wait = MIN_OPEN_S
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # whether calls failed
        self._in_a_row = 0

    @property
    def closed(self) -> bool:
        return self._until is None

    def acquire(self) -> int | None:
        """A ticket for a call, or None: it may not go."""
        with self._lock:
            if self._until is not None:
                if self._probing or self._clock() < self._until:
                    return None
                self._probing = True
                self._era += 1
            return self._era

    def succeeded(self, ticket: int) -> bool:
        """The call has succeeded. Returns whether this has closed the circuit."""
        with self._lock:
            if ticket != self._era:
                return False
            self._in_a_row = 0
            self._recent.append(False)
            if not self._probing:
                return False
            self._until, self._probing, self._wait = None, False, MIN_OPEN_S
            self._recent.clear()
            self._era += 1
            return True

    def failed(self, ticket: int, at_once: bool = False) -> float | None:
        """The call has failed. Returns the seconds for which this has opened the circuit, or None.

        `at_once` opens it without waiting for more failures.
        """
        with self._lock:
            if ticket != self._era:
                return None
            self._in_a_row += 1
            self._recent.append(True)
            often = self._in_a_row >= IN_A_ROW or 2 * sum(self._recent) >= WINDOW
            if not (self._probing or at_once or often):
                return None
            wait = self._wait * (0.5 + 0.5 * self._draw())  # so that not all clients come back at once
            self._wait = min(2 * self._wait, MAX_OPEN_S)
            self._until, self._probing, self._in_a_row = self._clock() + wait, False, 0
            self._recent.clear()
            self._era += 1
            return wait

    def abandon(self, ticket: int) -> None:
        """The call has ended without telling anything. If it was the probe, another may go."""
        with self._lock:
            if ticket == self._era and self._probing:
                self._probing = False
