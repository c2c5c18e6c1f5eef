"""A rank other than 0 that computes with PyTorch tensors: it obeys rank 0 (`torch_ranks.py`)."""

import os
import socket
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import numpy as np

from twostroke.backends.interface import RaggedBatch, Weights
from twostroke.backends.page_memory import PageMemory
from twostroke.backends.ranks import processes
from twostroke.backends.ranks.collectives import Collectives, device_of
from twostroke.backends.ranks.processes import PipeChannel
from twostroke.backends.ranks.rank_group import ANY_TIME, RankGroup, dist
from twostroke.backends.reference.memory import device_kv_room
from twostroke.backends.sharded_memory import PageShards, act_on_shard
from twostroke.backends.torch_ranks import NewMemory, TorchRankSetup
from twostroke.errors import InvalidRequest, OutOfPages, RankLost
from twostroke.models.config import ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.layer_groups import PageShape


class FollowerModel(Protocol):
    """A model in another rank than 0."""

    def follow(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> None:
        """Compute this rank's part of a pass."""
        ...

    def follow_head(self, rows: int) -> None:
        """Compute this rank's part of the logits of so many rows, whose hidden states rank 0 has."""
        ...


FollowerParts = tuple[NewMemory, Callable[[ModelConfig, Weights], FollowerModel]]  # make pages, and a part of a model


def main(file: int, parent: int) -> None:
    """Follow rank 0, which has started this process on its host, until it ends or a rank is lost."""
    processes.exit_with_parent(parent)
    facts: TorchRankSetup = PipeChannel(socket.socket(fileno=file)).wait()
    if facts.cores:
        os.sched_setaffinity(0, facts.cores)
    try:
        group = RankGroup(dist.FileStore(facts.store, facts.size), facts.rank, facts.size, facts.patience_s)
        follow(group, *facts.options)
    except RankLost:
        os._exit(1)


def follow(group: RankGroup, backend: str, device: str, staged: bool, *options: object) -> None:
    """Do what rank 0 says until the end. Raises RankLost.

    Args:
        backend: whose module has `unavailable` and `rank_of`.
        device, staged: as for `device_of`.
        options: of `rank_of`.
    """
    own, module = device_of(group.rank, device, staged), import_module(f"twostroke.backends.{backend}.backend")
    reason: str | None = module.unavailable(own)
    group.send(reason and InvalidRequest(f"rank {group.rank} cannot compute: {reason}"), 0)
    if not reason:
        links = Collectives(group, own, staged)
        Follower(links, module.rank_of(links, *options)).run()


class Follower:
    """The models and the pages of one rank."""

    def __init__(self, links: Collectives, parts: FollowerParts) -> None:
        self.links, self.group = links, links.group
        self._new_memory, self._compile = parts
        self._models: list[FollowerModel] = []
        self._pools: dict[int, PageMemory] = {}

    def run(self) -> None:
        """Follow until the end. Raises RankLost."""
        while (message := self.group.receive(limit=ANY_TIME)) != ("end",):
            match message:
                case ("compile", config):
                    self._models.append(self._compile(config, self._weights))
                case ("memory", number, num_pages, shape):
                    self.group.send(self._memory(number, num_pages, shape), 0)
                case ("room", weights):
                    self.group.send(device_kv_room(self.links.device, weights), 0)
                case ("forward", model, number, batch):
                    self._models[model].follow(batch, self._pools[number])
                case ("head", model, rows):
                    self._models[model].follow_head(rows)
                case (action, number, *places):
                    self.group.send(act_on_shard(self._pools[number], self.group.rank, action, places), 0)
                case _:
                    raise AssertionError(message)
        self.links.end()

    def _weights(self, _: str) -> RawTensor:
        return self.group.receive(limit=ANY_TIME)  # rank 0 may have to encode it first

    def _memory(self, number: int, num_pages: int, shape: PageShape) -> Exception | None:
        own = PageShards(num_pages, shape, self.group.size).of(self.group.rank)
        try:
            self._pools[number] = self._new_memory(num_pages, own, self.links.device)
        except OutOfPages as error:
            return error
        return None
