"""What a load gets of a server: how long users wait, and how busy the server is."""

from dataclasses import dataclass

import numpy as np

from twostroke.study.traffic.objectives import Objectives


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles, in seconds. `wanted` is the one that the objectives name."""

    mean: float
    p50: float
    p90: float
    p99: float
    wanted: float

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray, percent: float) -> "Percentiles":
        order = np.argsort(values)
        values, weights = values[order], weights[order] / weights.sum()
        reached = np.cumsum(weights)

        def at(share: float) -> float:
            return float(values[min(len(values) - 1, int(np.searchsorted(reached, share - 1e-12)))])

        return cls(float(values @ weights), at(0.5), at(0.9), at(0.99), at(percent / 100))


@dataclass(frozen=True)
class OpenLoopService:
    """A load that a server carries.

    Attributes:
        rate: requests a second.
        sequences: that decode at once, on average.
        prefill_share, decode_share: parts of the time in steps with a chunk, and in steps without.
        waiting_s: before prefill begins, on average.
        waited_s: of the wanted percentile of TTFT, what is waiting; the rest is prefill (`queueing.waited_in`).
        decode_s: the wanted percentile of gaps that are steps without a chunk.
    """

    rate: float
    sequences: float
    prefill_share: float
    decode_share: float
    waiting_s: float
    waited_s: float
    decode_s: float
    ttft: Percentiles
    itl: Percentiles

    def missed(self, objectives: Objectives) -> list[str]:
        """Objectives that are missed: "TTFT", "ITL"."""
        limits = (("TTFT", self.ttft, objectives.ttft_s), ("ITL", self.itl, objectives.itl_s))
        return [name for name, one, limit in limits if limit is not None and one.wanted > limit]


@dataclass(frozen=True)
class ClosedLoopService:
    """A fixed number of users, each of whom asks again at once. Means alone: of TTFT, `waiting_s` is waiting; of ITL,
    `decode_s` is a step without a chunk."""

    users: int
    rate: float
    sequences: float
    waiting_s: float
    decode_s: float
    ttft_s: float
    itl_s: float
