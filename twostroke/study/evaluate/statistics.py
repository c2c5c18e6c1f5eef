"""Intervals and tests, all at 95%: Wilson for shares, the bootstrap for means, McNemar's exact test for pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

Z = NormalDist().inv_cdf(0.975)
RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean or a share over `n` items, and where 95% lies. nan where n is 0."""

    n: int
    value: float
    low: float
    high: float


def wilson(successes: int, n: int) -> Estimate:
    """A share with the score interval of Wilson 1927, which holds for few items and near 0 and 1."""
    if not n:
        return Estimate(0, math.nan, math.nan, math.nan)
    share, square = successes / n, Z * Z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = Z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return Estimate(n, share, max(0.0, middle - half), min(1.0, middle + half))


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided p of McNemar's exact test: are the items that only one of two gets right divided evenly?

    The binomial of n = first_only + second_only at 1/2; items that both get right, or both wrong, say nothing.
    """
    n, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)


def bootstrap(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean over items and the percentile interval over resampled items, with fixed draws; nan is left out."""
    return bootstrap_columns(np.asarray(values, float)[:, None])[0]


def bootstrap_columns(values: np.ndarray) -> list[Estimate]:
    """Bootstrap each column of [items, columns]. Whole items are resampled, so columns stay together."""
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    counts = known.sum(0)
    weights = _draws(len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = filled.sum(0) / counts
        resampled = (weights @ filled) / (weights @ known)
    estimates: list[Estimate] = []
    for column, count in enumerate(counts.tolist()):
        if not count:
            estimates.append(Estimate(0, math.nan, math.nan, math.nan))
            continue
        low, high = np.nanpercentile(resampled[:, column], (2.5, 97.5)).tolist()
        estimates.append(Estimate(count, float(means[column]), low, high))
    return estimates


@lru_cache(maxsize=2)
def _draws(n: int) -> np.ndarray:
    """[RESAMPLES, n]: how often each item is drawn. Always the same, so that intervals are reproducible."""
    rng = np.random.default_rng(0)
    return np.stack([np.bincount(rng.integers(0, n, n), minlength=n) for _ in range(RESAMPLES)]).astype(float)
