"""What sampling asks of logits, row by row: the token that is likeliest or drawn, normalizer and entropy, weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from twostroke.kernels.noise import Noise, gumbel


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

    @property
    def finite(self) -> bool:
        """Whether `best` can be relied upon."""
        return all(map(math.isfinite, self.top))


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


def draw(logits: torch.Tensor, noises: Sequence[Noise]) -> list[int]:
    """Of each row of [R, vocab] logits the id of the largest, with noise; the lowest of several."""
    ids = np.arange(logits.shape[1])

    def scores(row: torch.Tensor, noise: Noise) -> torch.Tensor:
        if noise.key is None:
            return row
        return row.double() * noise.gain + torch.from_numpy(gumbel(noise.key, ids)).to(row.device)

    return [argmax(scores(row, noise)[None])[0] for row, noise in zip(logits, noises, strict=True)]


def weigh(logits: torch.Tensor, tops: Sequence[float], gains: Sequence[float]) -> list[float]:
    """Of each row of [R, vocab] logits the sum of exp((logit - top) * gain), or 0 where its gain is 0."""
    rows = zip(logits, tops, gains, strict=True)
    return [float(((row.double() - top) * gain).exp().sum()) if gain else 0.0 for row, top, gain in rows]


class Statistics(Protocol):
    """A backend's own way to find these; this module is PyTorch's."""

    def summarize(self, logits: torch.Tensor) -> Summary: ...

    def draw(self, logits: torch.Tensor, noises: Sequence[Noise]) -> list[int]: ...

    def weigh(self, logits: torch.Tensor, tops: Sequence[float], gains: Sequence[float]) -> list[float]: ...


def argmax(logits: torch.Tensor) -> list[int]:
    """The likeliest id of each row; the lowest of several."""
    # On a CPU, numpy's is many times as fast as torch's.
    return (logits.detach().numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()


def new_summaries(count: int) -> np.ndarray:
    """Room for what native/summary.h finds in each of so many rows."""
    return np.empty(count, [("best", np.int32), ("top", np.float32), ("sum", np.float32), ("weighted", np.float32)])


def combine(found: np.ndarray) -> Summary:
    """From sums of exp(x - top), and of the same times (x - top), over each of R rows."""
    normalizer = np.log(found["sum"])
    entropy = normalizer - found["weighted"] / found["sum"]
    return Summary(
        found["best"].tolist(), found["top"].tolist(), (found["top"] + normalizer).tolist(), entropy.tolist()
    )


class MadeSummaries:
    """What a head found beside its logits, [R, vocab], which it does not keep in memory."""

    def __init__(self, logits: torch.Tensor, found: np.ndarray) -> None:
        self.storage, self.width = StorageWeakRef(logits.untyped_storage()), logits.shape[1]
        self.found, self.taken = found, np.zeros(len(found), bool)

    def take(self, some: torch.Tensor) -> Summary | None:
        """Of rows of these very logits, in order, the first time: who was given them may have changed them since."""
        first, rest = divmod(int(some.storage_offset()), self.width)
        mine, same = slice(first, first + len(some)), StorageWeakRef(some.untyped_storage()) == self.storage
        if not same or rest or some.shape[1] != self.width or not some.is_contiguous() or self.taken[mine].any():
            return None
        self.taken[mine] = True
        return combine(self.found[mine])
