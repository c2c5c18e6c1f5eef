"""A lease: until when a sender holds a value for those who are to receive it.

    HELD --taken by all--> RELEASED
      |---- its time ----> EXPIRED      renewed by every sign of life of a transfer
      '--- the sender ---> CANCELLED

Only durations go over the wire, and each side measures them with its own monotonic clock. A lease that has ended never
comes back, so what is said to it late changes nothing.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal

TTL_S = 30.0  # seconds without a sign of life after which a lease ends

State = Literal["held", "released", "expired", "cancelled"]


class Lease:
    """Counts those who have received a value, and the time."""

    def __init__(self, receivers: int = 1, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        """`receivers`: how many are to receive the value."""
        self.ttl_s = ttl_s  # seconds that it lasts from its last renewal
        self._clock, self._left, self._lock = clock, receivers, threading.Lock()
        self._state: State = "held"
        self._until = clock() + ttl_s

    @property
    def state(self) -> State:
        with self._lock:
            self._look()
            return self._state

    @property
    def held(self) -> bool:
        return self.state == "held"

    def renew(self) -> bool:
        """Begin its time again. Returns False if it has ended."""
        with self._lock:
            self._look()
            if self._state == "held":
                self._until = self._clock() + self.ttl_s
            return self._state == "held"

    def receiver_done(self) -> bool:
        """One receiver has the value, or does not want it. Returns False if the lease had ended."""
        with self._lock:
            self._look()
            if self._state != "held":
                return False
            self._left -= 1
            if self._left <= 0:
                self._state = "released"
            return True

    def cancel(self) -> None:
        """End it now."""
        with self._lock:
            self._look()
            if self._state == "held":
                self._state = "cancelled"

    def _look(self) -> None:
        if self._state == "held" and self._clock() >= self._until:
            self._state = "expired"
