"""When requests come: in open loop, however slow the server is, or in closed loop, each after another's end."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


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
