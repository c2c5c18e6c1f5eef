"""When requests come, independent of how the server fares: the open loop."""

from __future__ import annotations

import numpy as np


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """[count] seconds from the start, the first at 0.

    Gaps are gamma-distributed with mean 1 / `rate` and shape `burstiness`, so their coefficient of variation is
    burstiness ** -0.5: 1 is a Poisson process, below it requests come in bursts, above it more evenly.
    """
    gaps = np.random.default_rng([seed, 0]).gamma(burstiness, 1 / (rate * burstiness), max(0, count - 1))
    return np.concatenate([np.zeros(min(count, 1)), np.cumsum(gaps)])
