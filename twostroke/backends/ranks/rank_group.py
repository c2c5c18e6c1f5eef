"""Messages and bytes between ranks without common memory, on one host or several (`torch.distributed`).

Rank 0 speaks, the others listen: every message is sent to each, and may take any time to come. Gathers and answers
must come within a limit of time. The process group is not PyTorch's default one, which belongs to the user's program.

Ranks that wait for rank 0 send it heartbeats. So rank 0 learns of a rank that ends (its connection closes), that hangs,
or whose host is gone, although nothing is computed.
"""

import os
import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed

from twostroke.backends.ranks.processes import raise_first
from twostroke.errors import InvalidRequest, RankLost

dist: Any = distributed  # its stores and process groups are documented, but not in its `__all__`

OBJECTS, ACTIVATIONS, HEARTBEATS = 0, 1, 2  # tags
ALIVE, LEAVING = 1, 0  # what a heartbeat says
HEARTBEATS_IN_TIME = 10  # heartbeats in the time that a rank may let others wait for it
PACKET = 16 << 10  # bytes of an exchange that need no second one
MEETING_S = 120.0  # in which all ranks must have started
ANY_TIME = timedelta(days=1000)  # until rank 0 has something to say


class RankGroup:
    """The process group, as one rank sees it.

    Attributes:
        rank, size: this rank's number, and how many there are.
        patience: how long a rank may let others wait for it.
    """

    def __init__(self, store: Any, rank: int, size: int, patience_s: float) -> None:
        """Meet the other ranks at a store. Raises RankLost if they do not come."""
        self.rank, self.size, self.patience = rank, size, timedelta(seconds=patience_s)
        self.store = store  # where they have met
        self.turn = threading.RLock()  # held by rank 0 for one message with all that belongs to it
        self.failure: RankLost | None = None  # why nothing can be computed any more
        self._losing = threading.Lock()
        self._closing = threading.Event()
        self._heartbeats: list[threading.Thread] = []
        self.on_loss: Callable[[], object] | None = None  # called once when a rank is lost
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=MEETING_S))
        except RuntimeError as error:
            raise self.lose(f"not all {size} ranks have come ({str(error).splitlines()[0]})") from None

    @classmethod
    def of_torchrun(cls, patience_s: float, wanted: int | None = None) -> "RankGroup":
        """The ranks that `torchrun` has started. Raises InvalidRequest if another number is wanted."""
        started = int(os.environ["WORLD_SIZE"])
        if wanted not in (None, started):
            raise InvalidRequest(f"torchrun has started {started} ranks: give tp={started}")
        store, rank, size = next(iter(dist.rendezvous("env://")))
        group = cls(dist.PrefixStore("twostroke", store), rank, size, patience_s)
        group._start_heartbeats()
        return group

    def lose(self, why: str) -> RankLost:
        """The first reason why the ranks cannot go on, from now on."""
        with self._losing:
            known, self.failure = self.failure, self.failure or RankLost(f"{why}: open the model again")
        if known is None and self.on_loss is not None:
            self.on_loss()
        return self.failure

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self.failure is not None:
            raise self.failure

    def _wait(self, work: Any, limit: timedelta) -> None:
        try:
            work.wait(limit)
        except RuntimeError:
            raise self.lose(f"a rank of {self.size} has ended, or has not answered for too long") from None

    # Heartbeats -------------------------------------------------------------------------------------------------

    def _start_heartbeats(self) -> None:
        parts = [partial(self._watch, rank) for rank in range(1, self.size)] if self.rank == 0 else [self._beat]
        self._heartbeats = [threading.Thread(target=part, name="heartbeats", daemon=True) for part in parts]
        for thread in self._heartbeats:
            thread.start()

    def _beat(self) -> None:
        """Tell rank 0 that this rank is alive, until it leaves."""
        interval_s = self.patience.total_seconds() / HEARTBEATS_IN_TIME
        with suppress(RankLost):
            while not self._closing.wait(interval_s):
                self._send(torch.tensor([ALIVE], dtype=torch.uint8), 0, HEARTBEATS)
            self._send(torch.tensor([LEAVING], dtype=torch.uint8), 0, HEARTBEATS)

    def _watch(self, rank: int) -> None:
        """Wait for the heartbeats of a rank. Its connection closes if it ends, and that ends the wait."""
        said = torch.tensor([ALIVE], dtype=torch.uint8)
        with suppress(RankLost):
            while int(said) == ALIVE:
                self._receive(said, rank, self.patience, HEARTBEATS)

    def close(self) -> None:
        """Leave: no heartbeat is sent or expected any more. Rank 0 has told the others before to end."""
        self._closing.set()
        for thread in self._heartbeats:
            if self.failure is None and thread is not threading.current_thread():
                thread.join()

    # Single bytes and objects -----------------------------------------------------------------------------------

    def _send(self, data: torch.Tensor, to: int, tag: int = OBJECTS) -> None:
        self.check()
        try:
            work = self._gloo.send([data], to, tag)
        except RuntimeError:
            raise self.lose(f"rank {to} of {self.size} has ended") from None
        self._wait(work, self.patience)

    def _receive(self, data: torch.Tensor, source: int, limit: timedelta, tag: int = OBJECTS) -> None:
        try:
            work = self._gloo.recv([data], source, tag)
        except RuntimeError:
            raise self.lose(f"rank {source} of {self.size} has ended") from None
        self._wait(work, limit)

    def send(self, message: object, to: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        self._send(torch.tensor([len(data)]), to)
        self._send(data, to)

    def receive(self, source: int = 0, limit: timedelta | None = None) -> Any:
        """The next object of a rank, within the limit of time, or within another. Raises RankLost."""
        size = torch.empty(1, dtype=torch.int64)
        self._receive(size, source, limit or self.patience)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._receive(data, source, self.patience)
        return pickle.loads(data.numpy().data)

    def send_all(self, *message: object) -> None:
        """Send a message from rank 0 to all others."""
        for rank in range(1, self.size):
            self.send(message, rank)

    def receive_all(self) -> list[Any]:
        """One answer of each other rank, at rank 0. Raises RankLost, or the error that one answers with."""
        return raise_first([self.receive(rank) for rank in range(1, self.size)])

    def ask(self, *message: object) -> list[Any]:
        """Send a message from rank 0 to all others, and take their answers. Raises what `receive_all` raises."""
        with self.turn:
            self.send_all(*message)
            return self.receive_all()

    # Bytes of all ----------------------------------------------------------------------------------------------

    def exchange(self, mine: np.ndarray) -> list[np.ndarray]:
        """The bytes of all ranks, uint8 each, of any number."""
        room = PACKET - 8
        first = np.zeros(PACKET, np.uint8)
        first[:8] = np.frombuffer(len(mine).to_bytes(8, "little"), np.uint8)
        first[8 : 8 + len(mine)] = mine[:room]
        found = [part.numpy() for part in self.all_gather(torch.from_numpy(first))]
        sizes = [int.from_bytes(part[:8].tobytes(), "little") for part in found]
        parts = [part[8 : 8 + size] for part, size in zip(found, sizes, strict=True)]
        if max(sizes) <= room:
            return parts
        rest = np.zeros(max(sizes) - room, np.uint8)
        rest[: max(len(mine) - room, 0)] = mine[room:]
        more = [part.numpy() for part in self.all_gather(torch.from_numpy(rest))]
        return [np.concatenate([a, b])[:size] for a, b, size in zip(parts, more, sizes, strict=True)]

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which have one shape.

        Each is sent to each: gloo's own `allgather` takes ten times as long for what a row has (docs/log.md).
        """
        parts = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._exchanged(dict.fromkeys(others, mine), {rank: parts[rank] for rank in others})
        return parts

    def broadcast(self, data: torch.Tensor) -> None:
        """Give all other ranks what rank 0 has in a tensor."""
        if self.rank:
            self._exchanged({}, {0: data})
        else:
            self._exchanged(dict.fromkeys(range(1, self.size), data), {})

    def _exchanged(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Send and receive activations, by rank."""
        self.check()
        try:
            works = [self._gloo.send([data], rank, ACTIVATIONS) for rank, data in sent.items()]
            works += [self._gloo.recv([data], rank, ACTIVATIONS) for rank, data in received.items()]
        except RuntimeError:
            raise self.lose(f"a rank of {self.size} has ended") from None
        for work in works:
            self._wait(work, self.patience)
