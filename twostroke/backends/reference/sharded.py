"""The reference's operations in several ranks.

On CPUs float32 has the bits of a single process: PyTorch computes an output of a product without regard to how many
other outputs there are. On GPUs its library chooses a product's way by the whole shape, and bits may differ.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from twostroke.backends.ranks.collectives import Collectives
from twostroke.backends.ranks.sharding import ColumnSplit, Shard
from twostroke.backends.reference.operations import DenseWeight, Operations
from twostroke.backends.torch_ranks import TensorShard, split_of_heads
from twostroke.models.config import Attention, ModelConfig
from twostroke.models.formats.tensor import RawTensor


class ShardedOperations(Operations):
    """The operations of one rank. Only what is named `whole`, and the two ends of the model, wait for the others."""

    def __init__(self, links: Collectives, dtype: str, threads: int, kv_dtype: str) -> None:
        super().__init__(links.device, dtype, threads, kv_dtype)
        self.links, self.group = links, links.group

    def pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> DenseWeight:
        packed = super().pack(parts, bias)
        splits = [part.split for part in parts if isinstance(part, TensorShard)]
        if not splits:
            return packed
        cuts = tuple(map(sum, zip(*(split.cuts for split in splits), strict=True)))
        return DenseWeight(packed.matrix, packed.bias, ColumnSplit(cuts, self.group.rank))

    def heads(self, config: ModelConfig, layer: int) -> ColumnSplit:
        return split_of_heads(config, layer, self.group.rank, self.group.size)

    def whole(self, x: torch.Tensor, split: ColumnSplit) -> torch.Tensor:
        return self.links.gather_columns(x, split)

    def norm_heads(self, x: torch.Tensor, weight: DenseWeight, eps: float, attention: Attention) -> torch.Tensor:
        """Each rank puts the heads of all ranks together, and keeps its own."""
        width, ranks = len(weight.matrix) // attention.num_kv_heads, self.group.size
        heads = [Shard(rank, ranks).kv_heads(attention) for rank in range(ranks)]
        split = ColumnSplit.of([range(own.start * width, own.stop * width) for own in heads], self.group.rank)
        normed = self.norm(self.whole(x.flatten(1), split), weight, eps)
        return normed[:, split.start : split.start + split.own].view(x.shape)

    def embed(self, weight: DenseWeight, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Each rank looks up the tokens that it has."""
        split, hidden = weight.split, weight.matrix.shape[1]
        if split.own:
            found = F.embedding((token_ids - split.start).clamp(0, split.own - 1), weight.matrix)
        else:
            found = weight.matrix.new_zeros(len(token_ids), hidden)
        ends = torch.tensor(split.cuts[1:], device=token_ids.device)
        rows = self.links.gather_owned_rows(found, token_ids, ends)
        return rows if scale == 1.0 else rows * scale

    def own_sinks(self, sink_logits: torch.Tensor, attention: Attention, heads: int) -> torch.Tensor:
        first = Shard(self.group.rank, self.group.size).kv_heads(attention).start
        first *= attention.num_heads // attention.num_kv_heads
        return sink_logits[first : first + heads]

    def head(self, x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
        return self.whole(super().head(x, weight), weight.split)
