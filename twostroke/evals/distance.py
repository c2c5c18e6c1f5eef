"""How far one distribution over the next token is from another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

ROWS = 64  # of logits compared at a time: 39 MB for each temporary with 152,000 words


def compare(baseline: torch.Tensor, mine: torch.Tensor, following: Sequence[int]) -> np.ndarray:
    """Of each of n rows of logits: surprise, KL from the baseline, and whether the likeliest is the same; [3, n]."""
    parts: list[torch.Tensor] = []
    for p, q, words in zip(baseline.split(ROWS), mine.split(ROWS), torch.tensor(following).split(ROWS), strict=True):
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        surprise = -log_q.gather(-1, words[:, None])[:, 0].double()
        divergence = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1, dtype=torch.float64)
        same = (p.argmax(-1) == q.argmax(-1)).double()
        parts.append(torch.stack([surprise, divergence, same]))
    return torch.cat(parts, -1).numpy()
