"""Which choices wait for pages that others hold, and for how long."""

from twostroke.engine.choice_state import PARKED, PREEMPTED, Shortage
from twostroke.engine.clock import Clock
from twostroke.engine.page_budget import PageBudget, pages_held
from twostroke.engine.queues import Queues
from twostroke.engine.request import Choice
from twostroke.errors import OutOfPages

HOLD_S = 2.0  # seconds in which pages that others hold are expected back
RETRY_S = 0.01  # seconds until a choice that waits for them looks again


class Shortages:
    """Decides whether a choice that found no pages waits, since others hold some that may come back."""

    def __init__(self, budget: PageBudget, queues: Queues, clock: Clock) -> None:
        self._budget, self._queues, self._clock = budget, queues, clock

    def waits(self, choice: Choice, error: OutOfPages) -> bool:
        """Whether a choice that runs alone and found no pages waits for those that others hold."""
        now = self._clock()
        if self._budget.pages_returning:
            self.extend(choice, now)
        elif not error.pages or not self._may_find(choice, error.pages):
            return False
        choice.shortage = choice.shortage or Shortage(now + HOLD_S)
        return now < choice.shortage.until

    def extend(self, choice: Choice, now: float) -> None:
        """Let a choice wait for pages that come back, however long that takes."""
        choice.shortage = choice.shortage or Shortage(0.0)
        choice.shortage.until = max(choice.shortage.until, now + RETRY_S)
        if choice.state is PREEMPTED:
            self._queues.move(choice, PARKED)

    def retry_after(self) -> float | None:
        """Seconds until pages that others hold may have come back; None if nobody waits for any."""
        now, choices = self._clock(), (*self._queues.active, *self._queues.waiting)
        shortages = [(one.state, one.shortage.until) for one in choices if one.shortage is not None]
        return RETRY_S if any(state is PARKED or now < until for state, until in shortages) else None

    def _may_find(self, choice: Choice, count: int) -> bool:
        """Whether pages are there by now, or are held by others: by values of a program, or of other threads."""
        own, in_use = pages_held(choice), self._budget.in_use()
        held = any(pages >= own.get(pool, 1) for pool, pages in in_use.items())
        return held or all(self._budget.could_hold(pool, count) for pool in in_use)
