"""A request as its user sees it: one stream of tokens, whoever makes them."""

from dataclasses import dataclass, field

from twostroke.engine.timings import Timings
from twostroke.study.traffic.requests import TrafficRequest


@dataclass(eq=False)
class SimulatedRequest:
    """One request, which may move between workers."""

    number: int  # its place in the order of arrival
    asked: TrafficRequest  # its prompt and how many tokens it wants
    arrival: float  # when it came
    # when its tokens were handed to the user, by workers that it has left
    tokens: list[float] = field(default_factory=list[float])
    scheduled: float | None = None  # when it was first computed on; None before
    requeued_s: float = 0.0  # seconds in the queue of an engine that had preempted it
    ended: float | None = None  # when its last token came; None before
    # cached, entered: prompt tokens that were found in a prefix index, and those that were not
    cached: int = 0
    entered: int = 0
    moves: int = 0  # how often it began again, since a worker died or a transfer was lost
    deaths: int = 0  # how often a worker died that was responsible for it
    preemptions: int = 0  # how often an engine preempted it

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
