"""How long prefills and steps take beside a number of sequences that decode: counted for a few, and between these."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from twostroke.models.cost import SequenceRows
from twostroke.study.traffic.requests import Traffic

SAMPLES = 48  # requests whose prefills are counted step by step; others lie between these by their tokens
QUANTILES = 65

Value = TypeVar("Value", float, np.ndarray)


@dataclass(frozen=True)
class ServerModel:
    """What serves.

    Attributes:
        seconds: of a step.
        budget: tokens of a step at most.
        max_sequences: sequences that decode at once, by memory and by the scheduler.
        request_s: that every request takes besides.
    """

    seconds: Callable[[Sequence[SequenceRows]], float]
    budget: int
    max_sequences: int
    request_s: float = 0.0


class ServiceTimes:
    """Service times of one server under the requests of one traffic.

    `context` is the mean of the entries before a decoded token, where not all of a prompt's are kept.
    """

    def __init__(self, server: ServerModel, traffic: Traffic, context: int | None = None) -> None:
        self._server, self._traffic, self._kept = server, traffic, context
        self._grids: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._steps: dict[int, float] = {}

    def decode(self, sequences: float) -> float:
        """Seconds of a step without a chunk."""
        return _between(self._step, max(1.0, sequences))

    def prefills(self, sequences: float) -> np.ndarray:
        """[requests] seconds of each prefill beside so many sequences."""
        tokens = self._computed[self._sample]
        order = np.argsort(tokens, kind="stable")
        found = _between(lambda count: self._grid(count)[0], sequences)
        lengths, which = self._lengths
        return np.interp(lengths, tokens[order], found[order])[which]

    def chunks(self, sequences: float) -> np.ndarray:
        """[QUANTILES] seconds of steps with a chunk."""
        return _between(lambda count: self._grid(count)[1], sequences)

    @cached_property
    def _computed(self) -> np.ndarray:
        """[requests] tokens of prompts that are not known."""
        return self._traffic.prompts - self._traffic.shared

    @cached_property
    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of tokens that are not known, each once, and [requests] which of them each prompt has."""
        return np.unique(self._computed, return_inverse=True)

    @cached_property
    def _sample(self) -> np.ndarray:
        """Requests from the shortest to the longest prefill."""
        order = np.argsort(self._computed, kind="stable")
        return np.unique(order[np.linspace(0, len(order) - 1, min(SAMPLES, len(order))).round().astype(int)])

    @cached_property
    def _context(self) -> int:
        """Mean entries before a decoded token: long answers have more of them."""
        if self._kept is not None:
            return self._kept
        prompts, outputs = self._traffic.prompts, self._traffic.outputs
        return int(np.sum((prompts + outputs / 2) * outputs) / np.sum(outputs))

    def _step(self, sequences: int) -> float:
        if sequences not in self._steps:
            self._steps[sequences] = self._server.seconds([SequenceRows(1, self._context, 1)] * sequences)
        return self._steps[sequences]

    def _grid(self, sequences: int) -> tuple[np.ndarray, np.ndarray]:
        """Prefills of the sample, and quantiles of their steps, beside a number of sequences."""
        if sequences not in self._grids:
            others = [SequenceRows(1, self._context, 1)] * sequences
            chunk = max(1, self._server.budget - sequences)
            totals, steps = list[float](), list[float]()
            for i in self._sample.tolist():
                known, prompt = int(self._traffic.shared[i]), int(self._traffic.prompts[i])
                starts = range(known, prompt, chunk)
                counts = [min(chunk, prompt - start) for start in starts]
                rows = [SequenceRows(n, at, int(at + n == prompt)) for n, at in zip(counts, starts, strict=True)]
                taken = [self._server.seconds([one, *others]) for one in rows]
                totals.append(sum(taken))
                steps += taken
            quantiles = np.quantile(steps, np.linspace(0, 1, QUANTILES))
            self._grids[sequences] = np.array(totals), quantiles
        return self._grids[sequences]


def _between(at: Callable[[int], Value], count: float) -> Value:
    """Linear between powers of two, so that few numbers of sequences are ever counted."""
    if count <= 1:
        low, high = 0, 1
    else:
        low = 1 << (int(count).bit_length() - 1)
        high = 2 * low
    if count in (low, high):
        return at(int(count))
    if low == 0:
        return (1 - count) * at(0) + count * at(1)
    part = (count - low) / (high - low)
    return (1 - part) * at(low) + part * at(high)
