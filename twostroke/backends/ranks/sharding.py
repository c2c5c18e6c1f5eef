"""The division of a model among ranks.

Outputs are shared out, never the inputs of a sum: a rank has some rows of every matrix, and multiplies them with whole
rows of activations. So each sum is computed by one rank, in the same order as without ranks. Attention is shared by KV
heads, with the query heads that read them. Where these do not divide, and pages are in memory of all ranks, each rank
makes queries, keys and values of whole heads, as many as another, and attention is shared by its work; elsewhere some
ranks have one KV head more. Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3) splits every second product
by its inputs instead, and adds partial sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.models.config import Attention, ModelConfig

UNIT = 32  # outputs that kernels compute together: a group of the next product's columns
VOCABULARY_UNIT = 1024  # logits whose statistics are computed together


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model. `together`: whether KV pages are in memory that all ranks share."""

    rank: int
    size: int
    together: bool = False

    def of(self, count: int, unit: int = 1) -> range:
        """This rank's range of `count` things, in whole units of `unit`. Rank 0 has one if there are any."""
        units = -(-count // unit)
        first, last = (-(-units * rank // self.size) * unit for rank in (self.rank, self.rank + 1))
        return range(min(first, count), min(last, count))

    def kv_heads(self, attention: Attention) -> range:
        """The KV heads of a layer that this rank has."""
        return self.of(attention.num_kv_heads)

    def any_head(self, attention: Attention) -> bool:
        """Whether a layer's attention is shared by its work, and not by KV heads."""
        return self.together and attention.num_kv_heads % self.size != 0

    def rows(self, config: ModelConfig, name: str, count: int) -> range:
        """The rows that this rank has of a matrix, by its Twostroke name and its number of rows."""
        *layer, part = name.split(".")
        if part in ("q", "k", "v", "q_gate"):
            attention = config.layers[int(layer[1])].attention
            if part.startswith("q") and self.any_head(attention):  # more heads where there are fewer of keys and values
                others = Shard(self.size - 1 - self.rank, self.size).of(attention.num_heads)
                first, last = attention.num_heads - others.stop, attention.num_heads - others.start
                return range(first * attention.head_dim, last * attention.head_dim)
            heads, size = self.kv_heads(attention), count // attention.num_kv_heads
            return range(heads.start * size, heads.stop * size)
        return self.of(count, VOCABULARY_UNIT if part in ("embed", "head") else UNIT)


@dataclass(frozen=True)
class ColumnSplit:
    """The columns of an activation that each rank computes: rank r those from cuts[r] to cuts[r + 1]."""

    cuts: tuple[int, ...]
    rank: int = 0  # this process's; in a single process it has all columns

    @property
    def start(self) -> int:
        """The first of this rank's columns."""
        return self.cuts[self.rank]

    @property
    def own(self) -> int:
        """The number of this rank's columns."""
        return self.cuts[self.rank + 1] - self.cuts[self.rank]

    @property
    def width(self) -> int:
        return self.cuts[-1]

    @classmethod
    def of(cls, ranges: Sequence[range], rank: int) -> "ColumnSplit":
        """Make it from the columns of all ranks, which follow one another."""
        return cls((*(own.start for own in ranges), ranges[-1].stop), rank)
