"""A transport that reads the sender's memory as NIXL does: pages land one by one, late, and nobody can stop it.

A page has what lies in its place when it is read, whosever that is by then. It may be damaged on its way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.chaos.network import Network
from tests.chaos.tasks import Process, Task
from twostroke.cluster.wire.arriving_pages import PageReservation
from twostroke.cluster.wire.channel import WireError

if TYPE_CHECKING:
    from tests.chaos.worker import Worker


@dataclass(frozen=True)
class Luck:
    """The share of pages that are damaged; seconds of a page."""

    rng: random.Random
    damaged: float
    page_s: float


class Reads:
    """Implements `Transport` for one worker."""

    name = "nixl"

    def __init__(self, network: Network, process: Process, luck: Luck, happened: Counter[str]) -> None:
        self.network, self.process, self.luck, self.happened = network, process, luck, happened
        self.worker: Worker

    def memory(self) -> dict[str, Any]:
        return {"agent": self.process.name}

    def reader(self, memory: dict[str, Any]) -> Reader:
        return Reader(self, self.worker.fleet.transports[memory["agent"]])

    def close(self) -> None: ...


class Reader:
    """Implements `PageReader`."""

    def __init__(self, here: Reads, there: Reads) -> None:
        self._here, self._there = here, there

    def begin(self, places: Sequence[int], frames: Sequence[int]) -> Reading:
        return Reading(self._here, self._there, places, frames)


class Reading:
    """Implements the protocol of that name."""

    def __init__(self, here: Reads, there: Reads, places: Sequence[int], frames: Sequence[int]) -> None:
        self._here, self._there, self._left = here, there, len(places)
        self._link = here.network.link(here.process, there.process)
        self._epoch = self._link.epoch
        self._waits: Task | None = None
        at = here.network.tasks.events.now
        for place, frame in zip(places, frames, strict=True):
            at += here.luck.rng.expovariate(1 / here.luck.page_s)
            self._link.carry(partial(self._reserve, place, frame, here.worker.landing_of(frame)), at)

    def _reserve(self, place: int, frame: int, reservation: PageReservation) -> None:
        if self._here.process.dead or self._there.process.dead:
            return
        self._here.worker.must_be_reserved(reservation, frame)
        data, luck = bytes(self._there.worker.llm.pool.memory.read_pages([place])[0]), self._here.luck
        if luck.rng.random() < luck.damaged:
            at = 4 * luck.rng.randrange(len(data) // 4) + 2
            data = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
            self._here.happened["damaged page"] += 1
        self._here.worker.llm.pool.memory.write_page(frame, data)
        self._left -= 1
        if self._waits is not None:
            self._here.network.tasks.wake(self._waits)

    def wait(self, limit_s: float) -> bool:
        tasks = self._here.network.tasks
        until = tasks.events.now + limit_s
        self._waits = tasks.current
        while self._left:
            if self._epoch != self._link.epoch or self._there.process.dead:
                raise WireError(f"NIXL could not read from {self._there.process.name}")
            if tasks.events.now >= until:
                return False
            tasks.park(min(until, tasks.events.now + 1.0))
        return True
