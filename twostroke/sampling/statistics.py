"""Statistics of rows of logits for sampling: most likely or drawn token, normalizer, entropy, largest logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twostroke.sampling.draw import Noise, gumbel

MIN_LOGIT = float(np.finfo(np.float32).min)
MAX_GROUP = 64
NO_TOKEN = -1  # instead of the id drawn from a row whose logits are NaN or infinite


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of R rows. A row's values do not depend on the other rows; they are nan if a logit is not finite."""

    best: list[int]  # the most likely id, the lowest in a tie
    top: list[float]  # its logit
    logsumexp: list[float]  # the normalizer: a log-probability, in nats, is logit - logsumexp
    entropy: list[float]  # entropy of the distribution, in nats

    def of(self, rows: Sequence[int]) -> "RowStatistics":
        """The statistics of some rows."""
        floats = (self.top, self.logsumexp, self.entropy)
        return RowStatistics([self.best[row] for row in rows], *([column[row] for row in rows] for column in floats))

    @property
    def finite(self) -> bool:
        """Whether all largest logits are finite, so that `best` is reliable."""
        return all(map(math.isfinite, self.top))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of [..., vocab] float logits, in nats; nan in a row whose largest logit is not finite."""
    out = np.empty_like(logits)
    with np.errstate(invalid="ignore"):
        for row, logprobs in zip(logits.reshape(-1, logits.shape[-1]), out.reshape(-1, logits.shape[-1]), strict=True):
            np.subtract(row, row.max(), out=logprobs)
            logprobs -= np.log(np.exp(logprobs).sum())
    return out


def picked(rows: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """The value at one id of each of R rows: [R]."""
    return rows[np.arange(len(rows)), list(ids)]


def sound(rows: np.ndarray, ids: Sequence[int]) -> list[int]:
    """The ids drawn from R rows, with NO_TOKEN for each row that has no finite largest logit.

    A draw finds NaN and infinity as the largest, so only the logit at the id is looked at. A draw may also end at a
    logit of -inf: if nothing else is allowed, or if the row has nothing else, which is not sound.
    """
    logits = picked(rows, ids).tolist()
    return [
        id if -math.inf < logit < math.inf or (logit == -math.inf < row.max() < math.inf) else NO_TOKEN
        for id, logit, row in zip(ids, logits, rows, strict=True)
    ]


def information(logprobs: np.ndarray, other: np.ndarray | float = 0.0) -> np.ndarray:
    """Mean of log p - other under p, [...] float64, in nats.

    This is minus the entropy of p, or with other = log q the KL divergence of p from q.
    """
    chances = np.exp(logprobs)
    with np.errstate(invalid="ignore"):  # probability 0 contributes 0, not nan
        return np.where(chances == 0, 0, chances * (logprobs - other)).sum(-1, dtype=float)


def summarize(logits: np.ndarray) -> RowStatistics:
    """Statistics of [R, vocab] float32 logits."""
    best, logprobs = logits.argmax(-1).tolist(), log_softmax(logits)
    top = picked(logits, best)
    return RowStatistics(best, top.tolist(), (top - picked(logprobs, best)).tolist(), (-information(logprobs)).tolist())


def draw(logits: np.ndarray, noises: Sequence[Noise]) -> list[int]:
    """For each row of [R, vocab] logits, the id of the largest logit plus noise; the lowest in a tie."""
    ids = np.arange(logits.shape[1])

    def scores(row: np.ndarray, noise: Noise) -> np.ndarray:
        return row if noise.key is None else row.astype(np.float64) * noise.gain + gumbel(noise.key, ids)

    return [int(scores(row, noise).argmax()) for row, noise in zip(logits, noises, strict=True)]


def weigh(logits: np.ndarray, tops: Sequence[float], gains: Sequence[float]) -> list[float]:
    """For each row of [R, vocab] logits, the sum of exp((logit - top) * gain), or 0 if the gain is 0."""
    rows = zip(logits, tops, gains, strict=True)
    with np.errstate(invalid="ignore"):  # nan for a row whose largest logit is not finite
        return [float(np.exp((row.astype(np.float64) - top) * gain).sum()) if gain else 0.0 for row, top, gain in rows]


def likeliest(logits: np.ndarray, counts: Sequence[int], floors: Sequence[float]) -> list[np.ndarray]:
    """For each row of [R, vocab] logits, the ids of the `count` largest logits, including ties: int64, ascending.

    Logits below the row's floor, and -inf, are left out. A count of 0 gives no ids; otherwise the row's largest logit
    must be finite.
    """
    found: list[np.ndarray] = []
    for row, count, floor in zip(logits, counts, floors, strict=True):
        ids = np.flatnonzero(row >= max(floor, MIN_LOGIT, _least(row, count))) if count else np.arange(0)
        if count < len(ids):
            values = row[ids]
            ids = ids[values >= np.partition(values, -count)[-count]]
        found.append(ids)
    return found


def _least(values: np.ndarray, count: int) -> float:
    """A lower bound of the `count` largest values, close to the smallest of them.

    It is the count-th largest of the maxima of groups of values.
    """
    if count >= len(values):
        return -math.inf
    size = min(MAX_GROUP, max(1, len(values) // (4 * count)))
    groups = len(values) // size
    tops = values[: groups * size].reshape(size, groups).max(0)
    return float(np.partition(tops, -count)[-count])


class Statistics(Protocol):
    """A backend's implementation of these functions; this module implements them in numpy."""

    def summarize(self, logits: np.ndarray) -> RowStatistics: ...

    def draw(self, logits: np.ndarray, noises: Sequence[Noise]) -> list[int]: ...

    def weigh(self, logits: np.ndarray, tops: Sequence[float], gains: Sequence[float]) -> list[float]: ...

    def likeliest(self, logits: np.ndarray, counts: Sequence[int], floors: Sequence[float]) -> list[np.ndarray]: ...


def new_summaries(count: int) -> np.ndarray:
    """An array [count] for the summaries that native/summary.h computes."""
    return np.empty(count, [("best", np.int32), ("top", np.float32), ("sum", np.float32), ("weighted", np.float32)])


def combine(found: np.ndarray) -> RowStatistics:
    """Statistics from each row's sums of exp(x - top) and of exp(x - top) * (x - top).

    NumPy's logarithm of float32 has other last bits on other processors; of float64, rounded, it has the same.
    """
    normalizer = np.log(found["sum"].astype(np.float64)).astype(np.float32)
    entropy = normalizer - found["weighted"] / found["sum"]
    return RowStatistics(
        found["best"].tolist(), found["top"].tolist(), (found["top"] + normalizer).tolist(), entropy.tolist()
    )
