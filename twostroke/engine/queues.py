"""Queues of choices by state, all in order of arrival."""

import bisect

from twostroke.engine.choice_state import ACTIVE, QUEUED, RUNNING, TRANSITIONS, ChoiceState
from twostroke.engine.request import Choice


class Queues:
    """First come, first served: a preempted choice returns to its place in the order."""

    def __init__(self) -> None:
        self.waiting: list[Choice] = []  # not started, or preempted, or parked
        self.running: list[Choice] = []  # what steps work on
        # all of whose strokes wait for pages from other tiers, or for a place among the running
        self.arriving: list[Choice] = []
        self.active: list[Choice] = []  # the running and the arriving, merged

    def move(self, choice: Choice, state: ChoiceState) -> None:
        """Change the state of a choice, by the table of transitions, and with it the queue that it is in."""
        assert state in TRANSITIONS[choice.state], f"a choice cannot go from {choice.state.value} to {state.value}"
        for queue in self._queues(choice.state):
            queue.remove(choice)
        choice.state = state
        for queue in self._queues(state):
            bisect.insort(queue, choice, key=lambda one: one.order)

    def _queues(self, state: ChoiceState) -> tuple[list[Choice], ...]:
        if state in ACTIVE:
            return (self.active, self.running if state is RUNNING else self.arriving)
        return (self.waiting,) if state in QUEUED else ()
