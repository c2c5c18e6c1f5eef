"""Distances between two distributions over the next token."""

from collections.abc import Sequence

import numpy as np

from twostroke.sampling.statistics import information, log_softmax, picked

ROWS = 64  # of logits compared at a time: 39 MB for each temporary at a vocabulary of 152,000


def compare(baseline: np.ndarray, mine: np.ndarray, following: Sequence[int]) -> np.ndarray:
    """Compare n rows of logits: surprise, KL from the baseline, and whether the likeliest token is the same; [3, n].

    Raises ValueError for other numbers of rows.
    """
    if not len(baseline) == len(mine) == len(following):
        raise ValueError(f"{len(baseline)}, {len(mine)} and {len(following)} rows cannot be compared")
    parts: list[np.ndarray] = []
    for start in range(0, len(following), ROWS):
        rows = slice(start, start + ROWS)
        p, q, words = baseline[rows], mine[rows], following[rows]
        log_q = log_softmax(q)
        surprise = -picked(log_q, words).astype(float)
        parts.append(np.stack([surprise, information(log_softmax(p), log_q), p.argmax(-1) == q.argmax(-1)]))
    return np.concatenate(parts, -1)
