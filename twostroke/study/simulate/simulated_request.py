"""A request as its user sees it: one stream of tokens, whoever makes them."""

from dataclasses import dataclass, field

from twostroke.engine.timings import Timings
from twostroke.study.traffic.requests import TrafficRequest


@dataclass(eq=False)
class SimulatedRequest:
    """One request, which may move between workers.

    Attributes:
        number: its place in the order of arrival.
        asked: its prompt and how many tokens it wants.
        arrival: when it came.
        tokens: when its tokens were handed to the user, by workers that it has left.
        scheduled: when it was first computed on; None before.
        requeued_s: seconds in the queue of an engine that had preempted it.
        ended: when its last token came; None before.
        cached, entered: prompt tokens that were found in a prefix index, and those that were not.
        moves: how often it began again, since a worker died or a transfer was lost.
        deaths: how often a worker died that was responsible for it.
        preemptions: how often an engine preempted it.
    """

    number: int
    asked: TrafficRequest
    arrival: float
    tokens: list[float] = field(default_factory=list[float])
    scheduled: float | None = None
    requeued_s: float = 0.0
    ended: float | None = None
    cached: int = 0
    entered: int = 0
    moves: int = 0
    deaths: int = 0
    preemptions: int = 0

    @property
    def left(self) -> int:
        """Tokens that are still wanted."""
        return self.asked.output_tokens - len(self.tokens)

    @property
    def queue_s(self) -> float:
        """Seconds in which it waited in a queue: before it was first computed on, and after each preemption."""
        first = self.arrival if self.scheduled is None else self.scheduled
        return first - self.arrival + self.requeued_s

    @property
    def timings(self) -> Timings:
        return Timings(self.arrival, self.scheduled, self.tokens, self.ended)
