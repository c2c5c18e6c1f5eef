"""A rank other than 0 of the reference: it does what rank 0 says."""

from __future__ import annotations

import os
import socket

from twostroke.backends.memory import HostMemory
from twostroke.backends.ranked_memory import Shapes, act
from twostroke.backends.reference.decoder import Decoder
from twostroke.backends.reference.operations import as_tensor
from twostroke.backends.reference.ranks import Facts, RankedOperations
from twostroke.errors import OutOfPages, RankLost
from twostroke.formats.tensor import RawTensor
from twostroke.ranks import processes
from twostroke.ranks.group import ANY_TIME, Group, dist
from twostroke.ranks.processes import Peer


def main(file: int, parent: int) -> None:
    """A process that rank 0 has started on its host."""
    processes.end_with(parent)
    facts: Facts = Peer(socket.socket(fileno=file)).wait()
    if facts.cores:
        os.sched_setaffinity(0, facts.cores)
    try:
        group = Group(dist.FileStore(facts.store, facts.size), facts.rank, facts.size, facts.patience_s)
        Follower(group, facts.dtype, facts.threads).run()
    except RankLost:
        os._exit(1)


def follow(group: Group, dtype: str, threads: int) -> None:
    """A rank that `torchrun` has started: do what rank 0 says until the end. Raises RankLost."""
    Follower(group, dtype, threads).run()


class Follower:
    """The models and the pages of one rank."""

    def __init__(self, group: Group, dtype: str, threads: int) -> None:
        self.group, self.dtype = group, dtype
        self.operations = RankedOperations(group, dtype, threads)
        self.models: list[Decoder] = []
        self.pools: dict[int, HostMemory] = {}

    def run(self) -> None:
        """Follow until the end."""
        self.group.send(None, 0)  # it is there
        while (message := self.group.receive(limit=ANY_TIME)) != ("end",):
            match message:
                case ("compile", config):
                    self.models.append(Decoder(config, self.operations, self._weights))
                case ("memory", number, shape):
                    self.group.send(self._memory(number, shape), 0)
                case ("forward", model, number, batch):
                    with self.operations.running():
                        kv = as_tensor(self.pools[number].storage)
                        self.models[model].forward(self.operations.enter(batch), kv)
                case ("logits", model, hidden):
                    with self.operations.running():
                        self.models[model].logits(hidden)
                case (action, number, *places):
                    self.group.send(act(self.pools[number], self.group.rank, action, places), 0)
                case _:
                    raise AssertionError(message)

    def _weights(self, _: str) -> RawTensor:
        return self.group.receive(limit=ANY_TIME)  # rank 0 may have to encode it first

    def _memory(self, number: int, shape: tuple[int, ...]) -> Exception | None:
        try:
            self.pools[number] = Shapes(shape, self.dtype, self.group.size).memory(self.group.rank)
        except OutOfPages as error:
            return error
        return None
