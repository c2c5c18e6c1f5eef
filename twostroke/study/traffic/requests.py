"""Who asks what, and when: the requests that a load generator sends, a planner counts and a simulator serves.

A prompt is a row of named pieces, and pieces of one name are the same tokens. So two prompts share a prefix as far as
their pieces are the same, and no token id is needed to know it.

They come in open loop, however slow the server is, or in closed loop, each after another's end.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from twostroke.errors import InvalidRequest

MEASURED, WARMUP = 1, 2  # streams of random numbers: prompts of the warm-up are not measured again


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """[count] seconds from the start, the first at 0.

    Gaps are gamma-distributed with mean 1 / `rate` and shape `burstiness`, so their coefficient of variation is
    burstiness ** -0.5: 1 is a Poisson process, below it requests come in bursts, above it more evenly.
    """
    gaps = np.random.default_rng([seed, 0]).gamma(burstiness, 1 / (rate * burstiness), max(0, count - 1))
    return np.concatenate([np.zeros(min(count, 1)), np.cumsum(gaps)])


@dataclass(frozen=True)
class OpenLoop:
    """`rate` requests per second; `burstiness` as in `arrivals`."""

    rate: float
    burstiness: float = 1.0

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, one for each request."""
        return arrivals(count, self.rate, self.burstiness, seed).tolist()

    def describe(self) -> dict[str, Any]:
        return {"loop": "OpenLoop"} | asdict(self)


@dataclass(frozen=True)
class Replay:
    """An open loop at given times: seconds from the start, ascending."""

    seconds: tuple[float, ...]

    def times(self, count: int, seed: int) -> list[float]:
        """The first `count` of them; nothing is drawn."""
        return list(self.seconds[:count])

    def describe(self) -> dict[str, Any]:
        return {"loop": "Replay", "seconds": self.seconds[-1] if self.seconds else 0.0}


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` requests in flight at any time."""

    concurrency: int

    def describe(self) -> dict[str, Any]:
        return {"loop": "ClosedLoop"} | asdict(self)


@dataclass(frozen=True)
class TokenRequest:
    """One request as it is sent: greedy, exactly `output_tokens` long."""

    prompt: list[int]
    output_tokens: int


class PromptPiece(NamedTuple):
    """`tokens` tokens of a prompt. What its name stands for is fixed, so equal names mean equal tokens."""

    name: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One request: when it comes, its prompt, and how many tokens it wants."""

    at: float  # seconds from the start; 0 in a closed loop, where it comes when another has ended
    pieces: tuple[PromptPiece, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True)
class Traffic:
    """Requests in order of their arrival. Raises InvalidRequest if there is none."""

    arrivals: Sequence[TrafficRequest]
    pattern: OpenLoop | Replay | ClosedLoop  # where their times are from; a closed loop has none
    seed: int = 0  # of the tokens of their prompts

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise InvalidRequest("a workload needs at least one request")

    @classmethod
    def replayed(cls, arrivals: Sequence[TrafficRequest], seed: int = 0) -> "Traffic":
        """Requests at the times that they say."""
        return cls(arrivals, Replay(tuple(one.at for one in arrivals)), seed)

    @property
    def concurrency(self) -> int | None:
        """Requests in flight in a closed loop; None in an open one."""
        return self.pattern.concurrency if isinstance(self.pattern, ClosedLoop) else None

    @cached_property
    def rate(self) -> float | None:
        """Mean requests per second of an open loop: what is drawn, or (n - 1) / the time from first to last.

        None in a closed loop, and for requests that all come at once.
        """
        if isinstance(self.pattern, OpenLoop):
            return self.pattern.rate
        span = self.arrivals[-1].at - self.arrivals[0].at
        return (len(self.arrivals) - 1) / span if span > 0 else None

    @cached_property
    def prompts(self) -> np.ndarray:
        """[requests] tokens of prompts."""
        return np.array([one.prompt_tokens for one in self.arrivals])

    @cached_property
    def outputs(self) -> np.ndarray:
        """[requests] tokens of answers."""
        return np.array([one.output_tokens for one in self.arrivals])

    @cached_property
    def shared(self) -> np.ndarray:
        """[requests] first tokens of a prompt that an earlier prompt has too: hits of an index that forgets nothing.

        At least one token of a prompt is computed, since its logits are needed.
        """
        seen, found = set[tuple[int, int]](), list[int]()
        for one in self.arrivals:
            known, chain, first = 0, 0, True
            for piece in one.pieces:
                chain = hash((chain, piece))
                first = first and (chain, piece.name) in seen
                known += piece.tokens if first else 0
                seen.add((chain, piece.name))
            found.append(min(known, one.prompt_tokens - 1))
        return np.array(found)

    def split(self, shares: Sequence[float]) -> "list[Traffic]":
        """The same requests at the same times in parts, each drawn with the probability of its share.

        Raises InvalidRequest for shares that are not above 0 or do not sum to 1, and for a closed loop.
        """
        if self.concurrency is not None:
            raise InvalidRequest("requests of a closed loop are not split: say a rate")
        if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-9:
            raise InvalidRequest(f"shares of requests are above 0 and sum to 1, not {', '.join(map(str, shares))}")
        of = np.random.default_rng([self.seed, 3]).choice(len(shares), len(self.arrivals), p=shares)
        parts = [[one for one, part in zip(self.arrivals, of, strict=True) if part == i] for i in range(len(shares))]
        return [Traffic.replayed(some, self.seed) for some in parts]

    def at_rate(self, rate: float) -> "Traffic":
        """The same requests, `rate` a second on average: all times are stretched alike. Requests that all come at
        once get random times.

        Raises InvalidRequest if the rate is not above 0, or for a closed loop, which has none.
        """
        if not rate > 0:
            raise InvalidRequest(f"a rate must be above 0 requests a second, not {rate:g}")
        if self.concurrency is not None:
            raise InvalidRequest("requests of a closed loop have no rate to change")
        if self.rate is None:
            return self.in_open_loop(OpenLoop(rate))
        factor = self.rate / rate
        arrivals = [replace(one, at=one.at * factor) for one in self.arrivals]
        if isinstance(self.pattern, OpenLoop):
            return Traffic(arrivals, replace(self.pattern, rate=rate), self.seed)
        return Traffic.replayed(arrivals, self.seed)

    def in_open_loop(self, pattern: OpenLoop) -> "Traffic":
        """The same requests at drawn times."""
        times = pattern.times(len(self.arrivals), self.seed)
        arrivals = [replace(one, at=at) for one, at in zip(self.arrivals, times, strict=True)]
        return Traffic(arrivals, pattern, self.seed)

    def in_closed_loop(self, pattern: ClosedLoop) -> "Traffic":
        """The same requests in a closed loop."""
        return Traffic([replace(one, at=0.0) for one in self.arrivals], pattern, self.seed)

    def token_requests(
        self, ordinary: Sequence[int], stream: int = MEASURED, count: int | None = None
    ) -> list[TokenRequest]:
        """The first `count` requests (None for all), with prompts of ids from `ordinary`.

        Another stream has the same shapes and shares no prefix. If there are fewer than `count`, they begin again.
        """
        wanted = len(self.arrivals) if count is None else count
        known: dict[PromptPiece, list[int]] = {}
        made: list[TokenRequest] = []
        for one in islice(cycle(self.arrivals), wanted):
            ids: list[int] = []
            for piece in one.pieces:
                if piece not in known:
                    rng = np.random.default_rng([self.seed, stream, piece.name])
                    known[piece] = rng.choice(ordinary, piece.tokens).tolist()
                ids += known[piece]
            made.append(TokenRequest(ids, one.output_tokens))
        return made
