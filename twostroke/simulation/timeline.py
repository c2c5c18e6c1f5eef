"""Utilization over time, in a bounded number of equal intervals."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 64  # intervals; when there would be more, pairs of them become one


@dataclass(slots=True)
class Interval:
    """What all workers did in an interval.

    Attributes:
        busy_s: seconds in which devices worked, of all workers together.
        prefill, decode: tokens entered in chunks, and in single rows.
        flops, bytes: FLOPs, and bytes of weights and KV read.
        running_s, waiting_s, page_s: choices that ran, that waited, and used pages, times seconds, of all workers.
    """

    busy_s: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    running_s: float = 0.0
    waiting_s: float = 0.0
    page_s: float = 0.0

    def add(self, other: Interval, share: float = 1.0) -> None:
        self.busy_s += share * other.busy_s
        self.prefill += share * other.prefill
        self.decode += share * other.decode
        self.flops += share * other.flops
        self.bytes += share * other.bytes
        self.running_s += share * other.running_s
        self.waiting_s += share * other.waiting_s
        self.page_s += share * other.page_s


class Timeline:
    """Adds up what happens in intervals of `width` seconds from 0 on; the width doubles as time goes on."""

    def __init__(self, width: float = 0.25) -> None:
        self.width = width
        self.intervals: list[Interval] = []

    def add(self, began: float, ended: float, what: Interval) -> None:
        """Something that went on evenly from `began` to `ended`."""
        while ended >= MOST * self.width:
            self._double()
        first, last = int(began / self.width), int(ended / self.width)
        while len(self.intervals) <= last:
            self.intervals.append(Interval())
        if first == last:
            self.intervals[first].add(what)
            return
        for i in range(first, last + 1):
            part = min(ended, (i + 1) * self.width) - max(began, i * self.width)
            self.intervals[i].add(what, part / (ended - began))

    def _double(self) -> None:
        self.width *= 2
        odd = self.intervals[1::2]
        self.intervals = self.intervals[::2]
        for one, other in zip(self.intervals, odd, strict=False):
            one.add(other)
