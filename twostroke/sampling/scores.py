"""Scores of given tokens: log-probabilities under rows of logits, without sampling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.sampling import statistics as summary
from twostroke.sampling.statistics import MIN_LOGIT, RowStatistics, Statistics


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A given token under the model's distribution, before temperature and penalties."""

    id: int  # the token
    logprob: float  # its log-probability, in nats; nan if the logits are not finite numbers
    rank: int  # its place among all tokens, 1 for the most likely one; of equal logits, the lower id comes first
    top: tuple[tuple[int, float], ...] = ()  # the most likely ids with their log-probabilities, in descending order

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding would have chosen the token."""
        return self.rank == 1


def score(
    logits: np.ndarray,
    ids: Sequence[int],  # R token ids
    count: int,  # number of most likely ids to return for each row
    statistics: Statistics = summary,  # the backend's implementation of statistics
    made: RowStatistics | None = None,  # statistics of these rows, if the head already computed them
) -> list[TokenScore]:
    """Score one token under each row of `logits`, [R, vocab] float32."""
    found = statistics.summarize(logits) if made is None else made
    counts = [min(count, logits.shape[1]) if math.isfinite(top) else 0 for top in found.top]
    likeliest = statistics.likeliest(logits, counts, [MIN_LOGIT] * len(counts))
    scores: list[TokenScore] = []
    for place, (id, row, best) in enumerate(zip(ids, logits, likeliest, strict=True)):
        own, normalizer = row[id], found.logsumexp[place]
        rank = 1 + int((row > own).sum()) + int((row[:id] == own).sum())
        falling = best[np.lexsort((best, -row[best]))][: counts[place]]
        top = tuple((int(one), float(row[one]) - normalizer) for one in falling)
        scores.append(TokenScore(id, float(own) - normalizer, rank, top))
    return scores
