"""A request as its user sees it: one stream of tokens, whoever makes them. Pieces of prompts with the same name have
the same tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from twostroke.engine.timings import Timings
from twostroke.study.traffic.requests import PromptPiece, TrafficRequest


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


def prompt_tokens(pieces: Iterable[PromptPiece], vocab: int) -> np.ndarray:
    """[n] int64 ids below vocab - 1, which is the id of all answers. Read-only.

    An id is a hash of its piece's name and its place in it, so pieces of different names differ in every page.
    """
    return _tokens_of(tuple(pieces), vocab)


@lru_cache(maxsize=16)  # a router and a worker ask for the same, one soon after the other
def _tokens_of(pieces: tuple[PromptPiece, ...], vocab: int) -> np.ndarray:
    places = [np.uint64(one.name) << np.uint64(32) | np.arange(one.tokens, dtype=np.uint64) for one in pieces]
    tokens = (_mixed(np.concatenate(places)) % np.uint64(max(1, vocab - 1))).astype(np.int64)
    tokens.flags.writeable = False
    return tokens


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014), a mixing permutation of 64-bit integers."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
