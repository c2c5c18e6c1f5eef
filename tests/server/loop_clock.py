"""The clock of the event loops of this process, which a test puts forward: no time limit is a race with the machine."""

import time


class LoopClock:
    """Ahead of the real one by what has passed in a test. A loop sees it at its next tick, within 10 ms."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() + self._ahead_s

    def passes(self, seconds: float) -> None:
        self._ahead_s += seconds
