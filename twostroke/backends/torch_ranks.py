"""Ranks that compute with PyTorch tensors, as rank 0 has them: processes, weights, and pages.

Rank 0 has the checkpoint, and sends each rank its rows of every matrix. Pages are shared out by KV heads, and go in
and out as whole pages: rank 0 puts them together.
"""

import os
import tempfile
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from twostroke.backends.interface import Weights
from twostroke.backends.page_memory import PageMemory, host_kv_room
from twostroke.backends.ranks import collectives, processes
from twostroke.backends.ranks.collectives import Collectives, device_of
from twostroke.backends.ranks.processes import Followers
from twostroke.backends.ranks.rank_group import RankGroup, dist
from twostroke.backends.ranks.sharding import ColumnSplit, Shard
from twostroke.backends.reference.memory import device_kv_room
from twostroke.backends.sharded_memory import PageShards, ShardedMemory
from twostroke.errors import RankLost
from twostroke.models.config import ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.layer_groups import PageShape
from twostroke.models.tensor_shapes import ROUTER

FOLLOWER = "twostroke.backends.torch_follower"  # the module that runs in other ranks
NewMemory = Callable[[int, PageShape, str], PageMemory]  # of a number of pages, a shape, a device


@dataclass(frozen=True, eq=False)
class TensorShard(RawTensor):
    """A rank's rows of a matrix, or its numbers of a bias. `split`: the division among all ranks."""

    split: ColumnSplit


def split_of(config: ModelConfig, name: str, count: int, rank: int, size: int) -> ColumnSplit:
    """The division of a matrix's rows among ranks, by its Twostroke name and its number of rows."""
    return ColumnSplit.of([Shard(i, size).rows(config, name, count) for i in range(size)], rank)


def split_of_heads(config: ModelConfig, layer: int, rank: int, size: int) -> ColumnSplit:
    """The division of the columns of a layer's attention outputs among ranks."""
    attention = config.layers[layer].attention
    return split_of(config, f"layers.{layer}.q", attention.num_heads * attention.head_dim, rank, size)


def part_of(raw: RawTensor, name: str, config: ModelConfig, rank: int, size: int) -> RawTensor:
    """A rank's part of a tensor: some rows of a matrix and of its bias, and all of a norm, a router or sink logits."""
    matrix = name.removesuffix("_bias")
    if matrix.endswith(f".{ROUTER}") or (matrix == name and len(raw.shape) == 1):
        return raw
    split = split_of(config, matrix, raw.shape[0], rank, size)
    if len(raw.shape) == 1:
        values = raw.dequantize()[split.start : split.start + split.own]
        part = RawTensor.from_bytes(name, "F32", values.shape, values.view(np.uint8), raw.source)
    else:
        part = raw.rows(split.start, split.start + split.own)
    return TensorShard(part.name, part.format, part.shape, part.data, part.source, split)


@dataclass(frozen=True)
class TorchRankSetup:
    """The first message to a rank on the same host. `options`: arguments of `torch_follower.follow`."""

    store: str
    rank: int
    size: int
    patience_s: float
    cores: list[int]
    options: tuple[Any, ...]


class TorchRanks:
    """All ranks, as rank 0 sees them.

    Attributes:
        group: sends messages.
        links: joins what ranks have computed.
    """

    def __init__(
        self, backend: str, size: int, device: str, new_memory: NewMemory, options: Sequence[object] = ()
    ) -> None:
        """Meet the ranks that `torchrun` has started, or start them on this host. Raises InvalidRequest, RankLost.

        Args:
            backend: "reference", "triton".
            device: of all ranks: "cpu", or "cuda" for a GPU each.
            options: of the backend's `rank_of`.
        """
        self._new_memory = new_memory
        self._pools: dict[int, bool] = {}  # number -> whether it is in use
        self._models = 0
        self.followers: Followers | None = None  # those that it has started
        staged = collectives.ONE_GPU
        own, options = device_of(0, device, staged), (backend, device, staged, *options)
        if processes.under_torchrun():
            self.group = RankGroup.of_torchrun(processes.RANK_TIMEOUT_S, size)
            self.group.send_all(*options)
            self._meet(own, staged)
        else:
            self._start(size, own, staged, options)
        self.group.on_loss = partial(_stop_others, self.links, self.followers)
        weakref.finalize(self, _end, self.group, self.links, self.followers)

    def _start(self, size: int, own: str, staged: bool, options: tuple[object, ...]) -> None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # all ranks are on this host
        cores, patience_s = processes.cores_of(size), processes.RANK_TIMEOUT_S
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            facts = [TorchRankSetup(store, i, size, patience_s, cores[i], options) for i in range(1, size)]
            group: list[RankGroup] = []

            def lose(rank: int) -> None:
                if group:
                    group[0].lose(f"rank {rank} of {size} has ended")

            self.followers = Followers(FOLLOWER, facts, (), lose)
            try:
                group.append(RankGroup(dist.FileStore(store, size), 0, size, patience_s))
                self.group = group[0]
                self.group.on_loss = self.followers.end
                self._meet(own, staged)  # the store must not go before
            except BaseException:
                self.followers.end()
                raise

    def _meet(self, own: str, staged: bool) -> None:
        self.group.receive_all()
        self.links = Collectives(self.group, own, staged)

    @contextmanager
    def together(self, *message: object) -> Generator[None]:
        """Tell all other ranks to compute what the caller computes meanwhile. Raises RankLost."""
        with self.group.turn:
            self.group.send_all(*message)
            try:
                yield
                self.group.check()  # a device that waited for a lost rank has been let go, with any numbers
            except RankLost:
                raise
            except BaseException as error:  # they wait for what will not come
                self.group.lose(f"rank 0 of {self.group.size} has not finished a step ({error})")
                raise

    @contextmanager
    def compiling(self, config: ModelConfig, weights: Weights) -> Generator[tuple[int, Weights]]:
        """Let the other ranks compile a model. Yields its number and rank 0's part of each tensor."""

        def tensor(name: str) -> RawTensor:
            raw, size = weights(name), self.group.size
            for rank in range(1, size):
                self.group.send(part_of(raw, name, config, rank, size), rank)
            return part_of(raw, name, config, 0, size)

        with self.group.turn:
            self.group.send_all("compile", config)
            yield self._models, tensor
            self._models += 1

    def kv_room(self, weights: int) -> int:
        """Bytes for whole pages beside `weights` bytes, which are shared out: by the device with the least room."""
        if self.links.device == "cpu":
            return host_kv_room()
        each = -(-weights // self.group.size)
        return self.group.size * min(device_kv_room(self.links.device, each), *self.group.ask("room", each))

    def memory(self, num_pages: int, shape: PageShape) -> ShardedMemory:
        """Zeroed pages. Raises OutOfPages."""
        with self.group.turn:
            number = next((one for one, used in self._pools.items() if not used), len(self._pools))
            shapes = PageShards(num_pages, shape, self.group.size)
            self.group.ask("memory", number, num_pages, shape)
            self._pools[number] = True
            own = self._new_memory(num_pages, shapes.of(0), self.links.device)
            made = ShardedMemory(self.group, number, shapes, own)
        weakref.finalize(made, self._pools.__setitem__, number, False)
        return made


def _stop_others(links: Collectives, followers: Followers | None) -> None:
    if followers is not None:
        followers.end()
    links.end()


def _end(group: RankGroup, links: Collectives, followers: Followers | None) -> None:
    if followers is None and group.failure is None:
        with suppress(RankLost):
            group.send_all("end")
    group.close()
    _stop_others(links, followers)
