"""The waiting, the running and the arriving choices, all in order of arrival."""

import bisect
import heapq

from twostroke.engine.request import Choice


class Queues:
    """First come, first served: a preempted choice returns to its place in the order.

    Attributes:
        waiting: not started.
        running: what steps work on.
        arriving: started, and all of their strokes wait for pages from other tiers, or for a place among the running.
    """

    def __init__(self) -> None:
        self.waiting: list[Choice] = []
        self.running: list[Choice] = []
        self.arriving: list[Choice] = []

    @property
    def active(self) -> list[Choice]:
        """All that have started."""
        if not self.arriving:
            return self.running
        return list(heapq.merge(self.running, self.arriving, key=lambda c: c.order))

    def wait(self, choice: Choice) -> None:
        """Queue a new choice, or one that must start again."""
        self._move(choice, self.waiting)

    def run(self, choice: Choice) -> None:
        self._move(choice, self.running)

    def arrive(self, choice: Choice) -> None:
        self._move(choice, self.arriving)

    def leave(self, choice: Choice) -> None:
        for queue in (self.waiting, self.running, self.arriving):
            if choice in queue:
                queue.remove(choice)

    def _move(self, choice: Choice, queue: list[Choice]) -> None:
        self.leave(choice)
        bisect.insort(queue, choice, key=lambda c: c.order)
