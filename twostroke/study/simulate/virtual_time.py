"""Virtual time: clocks that stand still, and planned events in order.

One thread runs the events, so a simulation with the same seed is the same.
"""

import heapq
from collections.abc import Callable

STEP_RANK = 1 << 30  # from this rank on: steps of engines


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


class EventQueue:
    """A queue by time. At the same time lower ranks come first, and steps of engines last; else the order is that of
    planning. What several engines do at one time has their numbers as ranks, so that it is the same however many steps
    each of them takes together.
    """

    def __init__(self) -> None:
        self.now = 0.0  # the time of the event that runs
        self.count = 0  # events that have run
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, moment: float, action: Callable[[], None], rank: int = 0) -> None:
        """Plan an action; a moment that has passed is now."""
        heapq.heappush(self._queue, (max(moment, self.now), rank, self._planned, action))
        self._planned += 1

    @property
    def next_time(self) -> float:
        """When the next event is; infinity if there is none."""
        return self._queue[0][0] if self._queue else float("inf")

    def step(self) -> bool:
        """Run the next event. Returns False if there is none."""
        if not self._queue:
            return False
        self.now, _, _, action = heapq.heappop(self._queue)
        self.count += 1
        action()
        return True
