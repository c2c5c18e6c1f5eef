"""The reference in several ranks: the decoder with a rank's part of each product, and rank 0's side of the ranks.

Float32 has the bits of a single process: PyTorch computes an output of a product without regard to how many other
outputs there are. Pages are shared out by KV heads, and go in and out as whole pages: rank 0 puts them together.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from twostroke.backends.interface import Weights
from twostroke.backends.ranked_memory import RankedMemory, Shapes
from twostroke.backends.reference.operations import DenseWeight, Operations, Split, TensorBatch
from twostroke.errors import RankLost
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import ROUTER, ModelConfig
from twostroke.ranks import processes
from twostroke.ranks.group import Group, dist
from twostroke.ranks.processes import Followers
from twostroke.ranks.shares import Share

MODULE = "twostroke.backends.reference.follower"


@dataclass(frozen=True, eq=False)
class RankPart(RawTensor):
    """A rank's rows of a matrix, or its numbers of a bias. `split`: who has which."""

    split: Split


def part_of(raw: RawTensor, name: str, config: ModelConfig, rank: int, size: int) -> RawTensor:
    """What a rank has of a tensor: some rows of a matrix and of its bias, and all of a norm or a router."""
    matrix = name.removesuffix("_bias")
    if matrix == name and (len(raw.shape) == 1 or name.endswith(f".{ROUTER}")):
        return raw
    count = raw.shape[0]
    split = Split((*(Share(i, size).rows(config, matrix, count).start for i in range(size)), count), rank)
    if len(raw.shape) == 1:
        values = raw.dequantize()[split.start : split.start + split.own]
        part = RawTensor.from_bytes(name, "F32", values.shape, values.view(np.uint8), raw.source)
    else:
        part = raw.rows(split.start, split.start + split.own)
    return RankPart(part.name, part.format, part.shape, part.data, part.source, split)


class RankedOperations(Operations):
    """The operations of one rank. Only what is named `whole`, and the two ends of the model, wait for the others."""

    def __init__(self, group: Group, dtype: str, threads: int) -> None:
        super().__init__("cpu", dtype, threads)
        self.group = group

    def pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> DenseWeight:
        packed = super().pack(parts, bias)
        splits = [part.split for part in parts if isinstance(part, RankPart)]
        if not splits:
            return packed
        cuts = tuple(map(sum, zip(*(split.cuts for split in splits), strict=True)))
        return DenseWeight(packed.matrix, packed.bias, Split(cuts, self.group.rank))

    def heads(self, config: ModelConfig) -> Split:
        size, ranks = config.num_heads // config.num_kv_heads * config.head_dim, self.group.size
        first = (Share(rank, ranks).kv_heads(config).start * size for rank in range(ranks))
        return Split((*first, config.num_heads * config.head_dim), self.group.rank)

    def whole(self, x: torch.Tensor, split: Split) -> torch.Tensor:
        return self.group.gather(x, split.cuts)

    def embed(self, weight: DenseWeight, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Each rank looks up the tokens that it has; for every token the numbers of the rank that has it are taken."""
        split, hidden = weight.split, weight.matrix.shape[1]
        if split.own:
            found = F.embedding((token_ids - split.start).clamp(0, split.own - 1), weight.matrix)
        else:
            found = weight.matrix.new_zeros(len(token_ids), hidden)
        all_found = self.group.gather(found, range(0, (self.group.size + 1) * hidden, hidden))
        owners = torch.bucketize(token_ids, torch.tensor(split.cuts[1:]), right=True)
        rows = all_found.view(len(token_ids), self.group.size, hidden)[torch.arange(len(token_ids)), owners]
        return rows if scale == 1.0 else rows * scale

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, batch: TensorBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        return super().attention(q, kv, batch, scale, window) if q.shape[1] else q.flatten(1)

    def head(self, x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
        return self.whole(super().head(x, weight), weight.split)


@dataclass(frozen=True)
class Facts:
    """What a rank on the same host has to know first."""

    store: str
    rank: int
    size: int
    dtype: str
    threads: int
    patience_s: float
    cores: list[int]


class ReferenceRanks:
    """All ranks, as rank 0 has them.

    Attributes:
        group: sends and gathers.
    """

    def __init__(self, size: int, dtype: str, threads: int) -> None:
        """Meet the ranks that `torchrun` has started, or start them on this host. Raises InvalidRequest, RankLost."""
        self.dtype = dtype
        self.followers: Followers | None = None  # those that it has started
        self._pools: dict[int, bool] = {}  # number -> whether it is in use
        self._models = 0
        if processes.under_torchrun():
            self.group = Group.of_torchrun(processes.PATIENCE_S, size)
            self.group.tell("reference", dtype, threads)
            self.group.answers()
        else:
            self._start(size, threads)
        weakref.finalize(self, _end, self.group, self.followers)

    def _start(self, size: int, threads: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
        cores, patience_s = processes.cores_of(size), processes.PATIENCE_S
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            facts = [Facts(store, i, size, self.dtype, threads, patience_s, cores[i]) for i in range(1, size)]
            group: list[Group] = []

            def lose(rank: int) -> None:
                if group:
                    group[0].lose(f"rank {rank} of {size} has ended")

            self.followers = Followers(MODULE, facts, (), lose)
            try:
                group.append(Group(dist.FileStore(store, size), 0, size, patience_s))
            except BaseException:
                self.followers.end()
                raise
            self.group = group[0]
            self.group.on_loss = self.followers.end
            self.group.answers()  # the store must not go before all have met all

    def ask(self, *message: object) -> list[Any]:
        """Send a message to all other ranks, and take their answers. Raises RankLost."""
        with self.group.turn:
            self.group.tell(*message)
            return self.group.answers()

    @contextmanager
    def compiling(self, config: ModelConfig, weights: Weights) -> Generator[tuple[int, Weights]]:
        """Let the others make a model; rank 0 makes it of what is given: its number, and its part of each tensor."""

        def tensor(name: str) -> RawTensor:
            raw, size = weights(name), self.group.size
            for rank in range(1, size):
                self.group.send(part_of(raw, name, config, rank, size), rank)
            return part_of(raw, name, config, 0, size)

        with self.group.turn:
            self.group.tell("compile", config)
            yield self._models, tensor
            self._models += 1

    def memory(self, shape: tuple[int, ...]) -> RankedMemory:
        """Zeroed pages. Raises OutOfPages."""
        with self.group.turn:
            number = next((one for one, used in self._pools.items() if not used), len(self._pools))
            shapes = Shapes(shape, self.dtype, self.group.size)
            for answer in self.ask("memory", number, shape):
                if isinstance(answer, Exception):
                    raise answer
            self._pools[number] = True
            made = RankedMemory(self, number, shapes)
        weakref.finalize(made, self._pools.__setitem__, number, False)
        return made


def _end(group: Group, followers: Followers | None) -> None:
    if followers is not None:
        followers.end()
    elif group.failure is None:
        with suppress(RankLost):
            group.tell("end")
