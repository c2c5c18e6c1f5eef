"""What sampling asks of logits, row by row: the token that is likeliest or drawn, normalizer, entropy, the largest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twostroke.sampling.noise import Noise, gumbel

LEAST = float(np.finfo(np.float32).min)
MOST_GROUPED = 64


@dataclass(frozen=True)
class RowStatistics:
    """Of R rows. A row's figures do not depend on the other rows; where a logit is not finite they are nan.

    Attributes:
        best: the likeliest id, the lowest of several.
        top: its logit.
        logsumexp: what turns a logit into a log-probability, in nats.
        entropy: of the distribution, in nats.
    """

    best: list[int]
    top: list[float]
    logsumexp: list[float]
    entropy: list[float]

    def of(self, rows: Sequence[int]) -> "RowStatistics":
        """Those of some rows."""
        floats = (self.top, self.logsumexp, self.entropy)
        return RowStatistics([self.best[row] for row in rows], *([column[row] for row in rows] for column in floats))

    @property
    def finite(self) -> bool:
        """Whether `best` can be relied upon."""
        return all(map(math.isfinite, self.top))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of [..., vocab] float logits, in nats; nan in a row whose largest is not finite."""
    out = np.empty_like(logits)
    with np.errstate(invalid="ignore"):
        for row, logprobs in zip(logits.reshape(-1, logits.shape[-1]), out.reshape(-1, logits.shape[-1]), strict=True):
            np.subtract(row, row.max(), out=logprobs)
            logprobs -= np.log(np.exp(logprobs).sum())
    return out


def picked(rows: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Of each of R rows the number of one id: [R]."""
    return rows[np.arange(len(rows)), list(ids)]


def information(logprobs: np.ndarray, other: np.ndarray | float = 0.0) -> np.ndarray:
    """The mean of log p - other under p, float64 [...]: minus the entropy of p, or its divergence from q, in nats."""
    chances = np.exp(logprobs)
    with np.errstate(invalid="ignore"):  # what has a probability of 0 contributes 0, not nan
        return np.where(chances == 0, 0, chances * (logprobs - other)).sum(-1, dtype=float)


def summarize(logits: np.ndarray) -> RowStatistics:
    """[R, vocab] float32 logits, in numpy."""
    best, logprobs = logits.argmax(-1).tolist(), log_softmax(logits)
    top = picked(logits, best)
    return RowStatistics(best, top.tolist(), (top - picked(logprobs, best)).tolist(), (-information(logprobs)).tolist())


def draw(logits: np.ndarray, noises: Sequence[Noise]) -> list[int]:
    """Of each row of [R, vocab] logits the id of the largest, with noise; the lowest of several."""
    ids = np.arange(logits.shape[1])

    def scores(row: np.ndarray, noise: Noise) -> np.ndarray:
        return row if noise.key is None else row.astype(np.float64) * noise.gain + gumbel(noise.key, ids)

    return [int(scores(row, noise).argmax()) for row, noise in zip(logits, noises, strict=True)]


def weigh(logits: np.ndarray, tops: Sequence[float], gains: Sequence[float]) -> list[float]:
    """Of each row of [R, vocab] logits the sum of exp((logit - top) * gain), or 0 where its gain is 0."""
    rows = zip(logits, tops, gains, strict=True)
    with np.errstate(invalid="ignore"):  # of a row whose largest is not finite: nan
        return [float(np.exp((row.astype(np.float64) - top) * gain).sum()) if gain else 0.0 for row, top, gain in rows]


def likeliest(logits: np.ndarray, counts: Sequence[int], floors: Sequence[float]) -> list[np.ndarray]:
    """Of each row of [R, vocab] logits ids (int64, rising): of so many of the largest, and all that equal their last,
    but for those below a floor, and for -inf. None where the count is 0; else a row's largest must be finite.
    """
    found: list[np.ndarray] = []
    for row, count, floor in zip(logits, counts, floors, strict=True):
        ids = np.flatnonzero(row >= max(floor, LEAST, _least(row, count))) if count else np.arange(0)
        if count < len(ids):
            values = row[ids]
            ids = ids[values >= np.partition(values, -count)[-count]]
        found.append(ids)
    return found


def _least(values: np.ndarray, count: int) -> float:
    """What at least `count` values are not below, and few more: the last of so many groups with the largest tops."""
    if count >= len(values):
        return -math.inf
    size = min(MOST_GROUPED, max(1, len(values) // (4 * count)))
    groups = len(values) // size
    tops = values[: groups * size].reshape(size, groups).max(0)
    return float(np.partition(tops, -count)[-count])


class Statistics(Protocol):
    """A backend's own way to find these; this module is numpy's."""

    def summarize(self, logits: np.ndarray) -> RowStatistics: ...

    def draw(self, logits: np.ndarray, noises: Sequence[Noise]) -> list[int]: ...

    def weigh(self, logits: np.ndarray, tops: Sequence[float], gains: Sequence[float]) -> list[float]: ...

    def likeliest(self, logits: np.ndarray, counts: Sequence[int], floors: Sequence[float]) -> list[np.ndarray]: ...


def new_summaries(count: int) -> np.ndarray:
    """Room for what native/summary.h finds in each of so many rows."""
    return np.empty(count, [("best", np.int32), ("top", np.float32), ("sum", np.float32), ("weighted", np.float32)])


def combine(found: np.ndarray) -> RowStatistics:
    """From sums of exp(x - top), and of the same times (x - top), over each of R rows."""
    normalizer = np.log(found["sum"])
    entropy = normalizer - found["weighted"] / found["sum"]
    return RowStatistics(
        found["best"].tolist(), found["top"].tolist(), (found["top"] + normalizer).tolist(), entropy.tolist()
    )
