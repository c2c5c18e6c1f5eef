"""Virtual time."""


class VirtualClock:
    """A clock that stands still unless it is moved. Calling it reads it, like `time.perf_counter`."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now  # seconds

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def until(self, moment: float) -> None:
        """Wait until a moment; nothing if it has passed."""
        self.now = max(self.now, moment)
