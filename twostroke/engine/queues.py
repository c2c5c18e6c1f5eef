"""The waiting and the running choices, both in order of arrival."""

import bisect

from twostroke.engine.request import Choice


class Queues:
    """First come, first served: a preempted choice returns to its place in the order."""

    def __init__(self) -> None:
        self.waiting: list[Choice] = []
        self.running: list[Choice] = []

    def wait(self, choice: Choice) -> None:
        """Queue a new choice, or a running choice that must start again."""
        self.leave(choice)
        bisect.insort(self.waiting, choice, key=lambda c: c.order)

    def run(self, choice: Choice) -> None:
        self.leave(choice)
        bisect.insort(self.running, choice, key=lambda c: c.order)

    def leave(self, choice: Choice) -> None:
        for queue in (self.waiting, self.running):
            if choice in queue:
                queue.remove(choice)
