"""A transport that writes into the receiver's memory as NIXL does: pages land one by one, late, and nobody can stop it.

Its notifications get lost, come late, or come twice, and a page may be damaged on its way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.chaos.network import Network
from tests.chaos.tasks import Process
from twostroke.kv.moves import Source
from twostroke.wire.channel import Channel, WireError
from twostroke.wire.tcp import TcpWriter
from twostroke.wire.transport import Digests, Grant

if TYPE_CHECKING:
    from tests.chaos.worker import Worker


@dataclass(frozen=True)
class Luck:
    """Shares of notifications that are lost, late or doubled, and of pages that are damaged; seconds of a page."""

    rng: random.Random
    lost: float
    late: float
    damaged: float
    page_s: float


class Writes:
    """Implements `Transport` for one worker."""

    name = "nixl"
    late = True

    def __init__(self, network: Network, process: Process, luck: Luck, happened: Counter[str]) -> None:
        self.network, self.process, self.luck, self.happened = network, process, luck, happened
        self.worker: Worker
        self._tags: set[str] = set()

    def claim(self) -> dict[str, Any]:
        return {"agent": self.process.name}

    def places(self, frames: Sequence[int]) -> list[int]:
        return list(frames)

    def writer(self, claim: dict[str, Any], channel: Channel) -> Writer | TcpWriter:
        if "agent" not in claim:
            return TcpWriter(channel)
        return Writer(self, self.worker.fleet.transports[claim["agent"]], channel)

    def notify(self, tag: str) -> None:
        self._tags.add(tag)

    def arrived(self, tag: str, limit_s: float) -> None:
        tasks = self.network.tasks
        until = tasks.events.now + limit_s
        while tag not in self._tags and tasks.events.now < until:
            tasks.sleep(limit_s / 16)
        self._tags.discard(tag)

    def close(self) -> None: ...


class Writer:
    """Implements `PageWriter`."""

    def __init__(self, here: Writes, there: Writes, channel: Channel) -> None:
        self._here, self._there, self._channel = here, there, channel
        self._link = here.network.link(here.process, there.process)

    def write(self, numbers: Sequence[int], sources: Sequence[Source], grant: Grant, digests: Digests) -> None:
        tasks, luck = self._here.network.tasks, self._here.luck
        task, epoch, left, at = tasks.current, self._link.epoch, [len(numbers)], tasks.events.now
        tag = f"{grant.generation}:{numbers[0]}:{luck.rng.random()}"

        def land(place: int, source: Source) -> None:
            if self._here.process.dead or self._there.process.dead:
                return
            self._there.worker.must_be_granted(grant.generation, place)
            data = bytes(source.data())  # only now: the sender has to hold it until then
            if luck.rng.random() < luck.damaged:
                at = 4 * luck.rng.randrange(len(data) // 4) + 2
                data = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
                self._here.happened["damaged page"] += 1
            self._there.worker.llm.pool.memory.write_page(place, data)
            left[0] -= 1
            assert task is not None
            tasks.wake(task)

        for number, source in zip(numbers, sources, strict=True):
            at += luck.rng.expovariate(1 / luck.page_s)
            self._link.carry(partial(land, grant.places[number], source), at)
        made = digests(numbers)
        while left[0] and epoch == self._link.epoch and not self._there.process.dead:
            tasks.park(tasks.events.now + 1.0)
        if left[0]:
            raise WireError(f"NIXL could not write to {self._channel.peer}")
        self._notify(tag)
        self._channel.send(
            "pages", numbers=list(numbers), digests=made, generation=grant.generation, inline=False, tag=tag
        )

    def _notify(self, tag: str) -> None:
        luck, events = self._here.luck, self._here.network.tasks.events
        if luck.rng.random() < luck.lost:
            worker, task = self._here.worker, self._here.network.tasks.current
            assert task is not None
            worker.fleet.hit("a notification is lost", worker.fleet.leases[worker.sending[task]])
            self._here.happened["lost notification"] += 1
            return
        late = luck.rng.random() < luck.late
        for delay in (0.0, 3.0) if late else (0.0,):  # late, and once more
            self._link.carry(partial(self._there.notify, tag), events.now + delay + 2.0 * late)
