"""Utilization over time, in a bounded number of equal intervals."""

from itertools import chain
from typing import NamedTuple

import numpy as np

MAX_INTERVALS = 64  # intervals; when there would be more, pairs of them become one
BATCH = 4096  # steps that are added up together, since array operations cost the same for one and for many


class TimelineInterval(NamedTuple):
    """What all workers did in an interval, or one in a step."""

    busy_s: float = 0.0  # seconds in which devices worked, of all workers together
    # prefill, decode: tokens entered in chunks, and in single rows
    prefill: float = 0.0
    decode: float = 0.0
    # flops, bytes: FLOPs, and bytes of weights and KV read
    flops: float = 0.0
    bytes: float = 0.0
    # running_s, waiting_s, page_s: choices that ran, that waited, and used pages, times seconds, of all workers
    running_s: float = 0.0
    waiting_s: float = 0.0
    page_s: float = 0.0


class Timeline:
    """Adds up what happens in intervals of `width` seconds from 0 on; the width doubles as time goes on.

    Sums are taken in the order in which steps are added, whatever the batches.
    """

    def __init__(self, width: float = 0.25) -> None:
        self._width = width
        self._count = 0  # intervals that have begun
        self._sums = np.zeros((len(TimelineInterval._fields), MAX_INTERVALS))
        self._began: list[float] = []  # of steps that are not added up yet
        self._ended: list[float] = []
        self._steps: list[TimelineInterval] = []

    def add(self, began: float, ended: float, what: TimelineInterval) -> None:
        """A step, which went on evenly from `began` to `ended`."""
        self._began.append(began)
        self._ended.append(ended)
        self._steps.append(what)
        if len(self._steps) >= BATCH:
            self._add_up()

    @property
    def width(self) -> float:
        """Seconds of an interval."""
        self._add_up()
        return self._width

    @property
    def intervals(self) -> list[TimelineInterval]:
        """All that have begun."""
        self._add_up()
        return [TimelineInterval(*row) for row in self._sums.T[: self._count].tolist()]

    def _add_up(self) -> None:
        if not self._steps:
            return
        began, ended = np.array(self._began), np.array(self._ended)
        steps = np.fromiter(chain.from_iterable(self._steps), np.float64).reshape(len(began), -1).T
        self._began, self._ended, self._steps = [], [], []
        start = 0
        while start < len(ended):
            late = ended[start:] >= MAX_INTERVALS * self._width
            if late[0]:
                self._double()
                continue
            stop = start + int(late.argmax()) if late.any() else len(ended)
            self._spread(began[start:stop], ended[start:stop], steps[:, start:stop])
            start = stop

    def _spread(self, began: np.ndarray, ended: np.ndarray, steps: np.ndarray) -> None:
        """Give each interval its share of each step: `steps` is [fields, n]."""
        width = self._width
        first, last = ((times / width).astype(np.int64) for times in (began, ended))
        counts = last - first + 1
        of = np.repeat(np.arange(len(counts)), counts)
        where = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        inside = np.minimum(ended[of], (where + 1) * width) - np.maximum(began[of], where * width)
        whole = counts[of] == 1
        shares = np.where(whole, 1.0, inside / np.where(whole, 1.0, (ended - began)[of]))
        places = np.concatenate([np.arange(MAX_INTERVALS), where])
        for sums, values in zip(self._sums, steps, strict=True):
            # Behind what is there: sums of floats depend on their order.
            sums[:] = np.bincount(places, np.concatenate([sums, shares * values[of]]), MAX_INTERVALS)
        self._count = max(self._count, int(last.max()) + 1)

    def _double(self) -> None:
        self._width *= 2
        pairs = self._sums[:, ::2] + self._sums[:, 1::2]
        self._sums = np.concatenate([pairs, np.zeros_like(pairs)], 1)
        self._count = -(-self._count // 2)
