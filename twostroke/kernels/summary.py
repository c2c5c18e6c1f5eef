"""What sampling asks of logits, row by row: the likeliest token, normalizer and entropy, weights at a temperature."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

CHUNK = 1024  # columns whose weights are added up; native/summary.h has the same
COLDEST = 1e-30  # of temperatures: one below does what this does, and its inverse would be no float32


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


def weigh(logits: torch.Tensor, tops: Sequence[float], temperatures: Sequence[float]) -> np.ndarray:
    """Of [R, vocab] logits, sums of exp((logit - top) / temperature) by chunks of CHUNK columns, in PyTorch.

    Temperatures are 0 or at least COLDEST.

    Returns:
        [R, chunks], float32; of a row whose temperature is 0, zeros.
    """
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % CHUNK), value=-torch.inf)
    sums = torch.zeros(len(logits), padded.shape[1] // CHUNK)
    for row, values in enumerate(padded.unflatten(-1, (-1, CHUNK))):
        if temperatures[row] > 0:
            sums[row] = ((values - tops[row]).double() / temperatures[row]).exp().sum(-1)
    return sums.numpy()


class Statistics(Protocol):
    """A backend's own way to find these; this module is PyTorch's."""

    def summarize(self, logits: torch.Tensor) -> Summary: ...

    def weigh(self, logits: torch.Tensor, tops: Sequence[float], temperatures: Sequence[float]) -> np.ndarray: ...


def argmax(logits: torch.Tensor) -> list[int]:
    """The likeliest id of each row; the lowest of several."""
    # On a CPU, numpy's is many times as fast as torch's.
    return (logits.detach().numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()


def new_summaries(count: int) -> np.ndarray:
    """Room for what native/summary.h finds in each of so many rows or chunks."""
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
