"""A token bucket: so much a minute, which fills steadily and holds a minute's worth."""

from collections.abc import Callable

FULL_MINUTE_S = 60.0
TOLERANCE = 1e-6  # of an amount: sums of floating-point numbers


class TokenBucket:
    """It is full at the beginning, and may owe: what is charged later than it was taken may be more than is left."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """`clock` is in seconds."""
        self.per_minute, self._clock = per_minute, clock
        self._level, self._at = float(per_minute), clock()

    def resize(self, per_minute: int) -> None:
        """Another amount a minute from now on. What is left stays, as far as there is room for it."""
        self._fill()
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there; 0 if it is. An amount above that of a minute never is."""
        self._fill()
        missing = amount - self._level
        return 0.0 if missing <= TOLERANCE else missing * FULL_MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Take an amount, also one that is not there; a negative one is given back."""
        self._fill()
        self._level = min(self._level - amount, float(self.per_minute))

    @property
    def left(self) -> int:
        """What is there, in whole tokens, at least 0."""
        self._fill()
        return max(0, int(self._level + TOLERANCE))

    @property
    def full_in_s(self) -> float:
        """Seconds until it is full."""
        return self.wait_s(self.per_minute)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / FULL_MINUTE_S)
        self._at = now
