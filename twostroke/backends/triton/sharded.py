"""The GPU backend in several ranks: each launches its part of every product, and the results are gathered.

Bits are those of one GPU. A product is cut into segments by the shape of the whole weight, and each of its outputs is
computed by one rank, along the same chain. What a rank has of a sum's parts it adds in their order before it is joined
with what others have. Kernels are launched one by one: no graph holds what several GPUs do together.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from twostroke.backends.interface import DrawnTokens, ForwardOutput, RaggedBatch, Weights
from twostroke.backends.page_memory import PageMemory
from twostroke.backends.ranks.collectives import Collectives
from twostroke.backends.ranks.sharding import ColumnSplit, Shard
from twostroke.backends.sharded_memory import ShardedMemory
from twostroke.backends.torch_ranks import TorchRanks, split_of, split_of_heads
from twostroke.backends.triton.decoder import TritonDecoder
from twostroke.backends.triton.experts import Mixture
from twostroke.backends.triton.linear import PADDING, Linear
from twostroke.backends.triton.model import LaunchedTokens, TritonModel
from twostroke.backends.triton.pass_buffers import PassBuffers
from twostroke.models.config import ModelConfig
from twostroke.sampling.draw import Sampled


@dataclass(frozen=True)
class BroadcastTokens:
    """Tokens that rank 0 has drawn; implements `DrawnTokens` for the others, to whose devices they come in a pass."""

    count: int

    def __len__(self) -> int:
        return self.count

    def read(self) -> list[Sampled]:
        raise AssertionError("only rank 0 reads tokens")


class ShardedDecoder(TritonDecoder):
    """A rank's part of a model's weights, and of its pass."""

    def __init__(self, config: ModelConfig, links: Collectives, weights: Weights, kv_dtype: str) -> None:
        rank, size = links.group.rank, links.group.size
        self.links = links
        self.heads = split_of_heads(config, 0, rank, size)
        self.has_heads = self.heads.own > 0
        every = [Shard(one, size).kv_heads(config.attentions[0]) for one in range(size)]
        self.kv_heads = ColumnSplit.of(every, rank)
        self.hidden = split_of(config, "down", config.hidden_size, rank, size)
        self.vocabulary = split_of(config, "embed", config.vocab_size, rank, size)
        self._ends = torch.tensor(self.vocabulary.cuts[1:], dtype=torch.int32, device=links.device)
        super().__init__(config, links.device, weights, kv_dtype, with_heads_of(config, Shard(rank, size)))

    def _whole(self, x: torch.Tensor, split: ColumnSplit, rows: int) -> torch.Tensor:
        """[.., own] -> [padded rows, width]."""
        made = x.new_zeros(-(-rows // PADDING) * PADDING, split.width)
        self.links.gather_columns(x[:rows, : split.own], split, made[:rows])
        return made

    def whole_heads(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return self._whole(x, self.heads, rows)

    def whole_bias(self, own: torch.Tensor) -> torch.Tensor:
        return self.links.gather_columns(own[None], self.hidden)[0]

    def of_own_heads(self, values: torch.Tensor) -> torch.Tensor:
        each = len(values) // self.kv_heads.width  # heads for a KV head
        return values[self.kv_heads.start * each : (self.kv_heads.start + self.kv_heads.own) * each]

    def whole_squares(self, own: torch.Tensor) -> torch.Tensor:
        each = own.shape[1] // (self.kv_heads.own or self.kv_heads.width)  # a rank without heads is described with all
        split = replace(self.kv_heads, cuts=tuple(cut * each for cut in self.kv_heads.cuts))
        return self.links.gather_columns(own[:, : split.own], split)

    def whole_gated(self, gated: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        split = split_of(self.config, "gate", width, self.links.group.rank, self.links.group.size)
        return self._whole(gated, split, rows)

    def add(self, linear: Linear, x: torch.Tensor, rows: int, to: PassBuffers, post: torch.Tensor | None) -> int:
        linear(x, to.parts, rows)
        total, *others = linear.made(to.parts, rows)
        for part in others:
            total = total + part
        return self._join(total, to)

    def mix(self, mixture: Mixture, routed: torch.Tensor, rows: int, to: PassBuffers) -> int:
        mixture(to.h, to.parts, rows, routed)
        return self._join(to.parts[: rows * mixture.features].view(rows, mixture.features), to)

    def _join(self, made: torch.Tensor, to: PassBuffers) -> int:
        """All columns of what is added to the residual stream, as one part."""
        rows, hidden = len(made), self.config.hidden_size
        self.links.gather_columns(made, self.hidden, to.parts[: rows * hidden].view(rows, hidden))
        return 1

    def embed(self, rows: int, to: PassBuffers) -> None:
        """Each rank looks up the tokens that it has."""
        split, ids = self.vocabulary, to.ids[:rows]
        found = torch.zeros(rows, self.config.hidden_size, dtype=torch.float32, device=self.device)
        if split.own:
            own = (ids - split.start).clamp(0, split.own - 1)
            self.look_up(self.table, self.config.embedding_scale, own, found, rows)
        to.x[:rows] = self.links.gather_owned_rows(found, ids, self._ends)


def with_heads_of(config: ModelConfig, share: Shard) -> ModelConfig:
    """The description with the heads of a rank; with all if it has none, and then nothing attends there."""
    count = len(share.kv_heads(config.layers[0].attention))
    if not count:
        return config
    heads = count * (config.num_heads // config.num_kv_heads)
    layers = (
        replace(layer, mixer=replace(layer.attention, num_heads=heads, num_kv_heads=count)) for layer in config.layers
    )
    return replace(config, layers=tuple(layers))


class ShardedTritonModel(TritonModel):
    """A rank's part of a model. Rank 0's does what `CompiledModel` says, and the others' do what rank 0 says."""

    CAPTURES = False

    def __init__(
        self,
        config: ModelConfig,
        links: Collectives,
        weights: Weights,
        kv_dtype: str,
        lead: tuple[TorchRanks, int] | None = None,
    ) -> None:
        """`lead`: all ranks and the model's number, at rank 0; None at the other ranks."""
        self.links, self.lead = links, lead
        self.vocabulary = split_of(config, "head", config.vocab_size, links.group.rank, links.group.size)
        super().__init__(config, links.device, weights, kv_dtype)

    def _decoder(self, weights: Weights, kv_dtype: str) -> ShardedDecoder:
        return ShardedDecoder(self.config, self.links, weights, kv_dtype)

    @contextmanager
    def _own(self) -> Generator[None]:
        with self.links.group.turn, super()._own():
            yield
            self.links.group.check()

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        assert self.lead is not None
        assert isinstance(memory, ShardedMemory)
        (ranks, number), drawn = self.lead, None if batch.drawn is None else BroadcastTokens(len(batch.drawn))
        with ranks.together("forward", number, memory.number, replace(batch, drawn=drawn)):
            return super().forward(batch, memory)

    def _take(self, drawn: DrawnTokens) -> None:
        if self.lead is not None:
            super()._take(drawn)
        self.links.broadcast(self._drawn_room(len(drawn)))

    def _flying(self, ids: torch.Tensor) -> LaunchedTokens:
        return LaunchedTokens(ids, self.links.group.check)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lead is not None
        (ranks, number), rows = self.lead, len(hidden)
        with ranks.together("head", number, rows):
            self._x[:rows].copy_(hidden)
            return self._head(rows)

    def _head(self, rows: int) -> torch.Tensor:
        """Logits of the first rows that rank 0 has in `_x`."""
        self.links.broadcast(self._x[:rows])
        self.decoder.launch_head(self._x, self._h, self._out, rows)
        return self.links.gather_columns(self._out[:rows], self.vocabulary)

    def follow(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> None:
        """Compute this rank's part of a pass. Rank 0 calls `forward` meanwhile."""
        super().forward(batch, memory)

    def follow_head(self, rows: int) -> None:
        """Compute this rank's part of the logits of rank 0's rows."""
        with self._own():
            self._head(rows)
