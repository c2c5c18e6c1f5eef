"""What sampling asks of logits, row by row: the likeliest token, the normalizer, the entropy."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Summary:
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


def summarize(logits: torch.Tensor) -> Summary:
    """[R, vocab] float32 logits, in PyTorch."""
    best = argmax(logits)
    rows = list(range(len(best)))
    # Not logsumexp, which may sum a row in another order when there are others.
    logprobs = logits.log_softmax(-1)
    top = logits[rows, best]
    # A probability of 0 contributes 0, not nan.
    terms = [torch.where(row > -torch.inf, row.exp() * row, 0).sum() for row in logprobs]
    return Summary(best, top.tolist(), (top - logprobs[rows, best]).tolist(), (-torch.stack(terms)).tolist())


def argmax(logits: torch.Tensor) -> list[int]:
    """The likeliest id of each row; the lowest of several."""
    # On a CPU, numpy's is many times as fast as torch's.
    return (logits.detach().numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()


def combine(best: np.ndarray, top: np.ndarray, total: np.ndarray, weighted: np.ndarray) -> Summary:
    """From sums of exp(x - top), and of the same times (x - top), over a row: [R] each."""
    normalizer = np.log(total)
    return Summary(best.tolist(), top.tolist(), (top + normalizer).tolist(), (normalizer - weighted / total).tolist())
