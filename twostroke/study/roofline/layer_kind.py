"""Equal layers of a model: their matrices, and what their attention or their state computes, reads and keeps."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from twostroke.models.config import Attention, Experts, Layer
from twostroke.models.cost import SequenceRows, attended, experts_read, recurrent
from twostroke.models.kv_formats import KVFormat
from twostroke.models.latent import Latent
from twostroke.models.recurrent import RecurrentMixer
from twostroke.models.tensor_shapes import is_product, layer_shapes

# The names of matrices behind the mixer begin so.
FEED_FORWARD = ("gate", "up", "down", "router", "experts", "shared", "input_")
NUMBER = re.compile(r"\.\d+")  # of an expert or a head


class WeightMatrix(NamedTuple):
    """A matrix of one layer, or the head: `copies` of them, of which each row is multiplied with `used`."""

    name: str
    part: str  # "projections", "feed-forward" or "head"
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1

    @property
    def of_experts(self) -> bool:
        return self.name.startswith("experts.")

    @property
    def parameters(self) -> int:
        return self.copies * self.inputs * self.outputs

    @property
    def row_flops(self) -> int:
        """FLOPs of one row: a multiplication and an addition for each weight that it is multiplied with."""
        return 2 * self.used * self.inputs * self.outputs

    def read(self, rows: float) -> float:
        """Expected number of copies that a step of `rows` rows, at least one, reads."""
        return experts_read(self.copies, self.used, rows)


@dataclass(frozen=True)
class LayerKind:
    """`count` equal layers of a model of so many `hidden` numbers, each of which gets `inputs` numbers of a token.

    Simulations ask for each row of each step, so what it is made of is kept.
    """

    count: int
    layer: Layer
    hidden: int
    inputs: int = 0

    @cached_property
    def attention(self) -> Attention | None:
        """None for a layer that has a state in its place."""
        return self.layer.mixer if isinstance(self.layer.mixer, Attention) else None

    @cached_property
    def state(self) -> RecurrentMixer | None:
        return self.layer.mixer if isinstance(self.layer.mixer, RecurrentMixer) else None

    @cached_property
    def latent(self) -> Latent | None:
        return None if self.attention is None else self.attention.latent

    @cached_property
    def window(self) -> int | None:
        return None if self.attention is None else self.attention.window

    @cached_property
    def heads(self) -> int:
        """Heads of queries, which devices divide; of a state, of its keys."""
        mixer = self.layer.mixer
        return mixer.num_heads if isinstance(mixer, Attention) else mixer.num_k_heads

    @cached_property
    def kv_heads(self) -> int:
        return self.heads if self.attention is None else self.attention.num_kv_heads

    def entry_bytes(self, stored: KVFormat) -> int:
        """Bytes of an entry in one layer, with its scales; 0 if it has a state, or reads another layer's entries."""
        one = self.attention
        if one is None or one.source is not None:
            return 0
        vectors = one.kv_values // one.head_dim  # K and V of each KV head, or one that is both
        return vectors * stored.head_bytes(one.head_dim) // 2

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query-key pair in one layer with attention, all heads: the score, and the weighted value."""
        return 0 if self.attention is None else 4 * self.heads * self.attention.head_dim

    @property
    def gathered(self) -> int:
        """Numbers of a row that devices hand to each other in a layer, where they share out outputs."""
        mixer, mlp = self.layer.mixer, self.layer.feed_forward
        mixed = mixer.mixed if isinstance(mixer, Attention) else mixer.v_size
        return mixed + 2 * self.hidden + (mlp.chosen if isinstance(mlp, Experts) else 1) * mlp.intermediate_size

    def mixing(self, rows: SequenceRows, stored: KVFormat) -> tuple[int, float]:
        """What a sequence's rows take in one layer beside its matrices: FLOPs, and bytes of KV, rows and states."""
        if self.state is not None:
            work = recurrent(rows, self.state)
            return work.flops, work.bytes
        pairs, entries = attended(rows, self.window)
        flops = self.pair_flops * pairs
        if self.latent is not None:
            flops = self.heads * latent_flops(self.latent, pairs, rows.context)
        return flops, self.entry_bytes(stored) * entries

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer, as the engine names them."""
        own = {} if not self.inputs else {"input_table": (self.inputs, self.hidden)}
        return layer_shapes(self.layer, self.hidden, self.inputs) | own

    @property
    def matrices(self) -> list[WeightMatrix]:
        """The matrices of one layer; those of experts, and of heads, are copies of one."""
        shapes = ((NUMBER.sub("", name), shape) for name, shape in self.shapes.items() if is_product(name, shape))
        made: list[WeightMatrix] = []
        for (name, (outputs, inputs)), copies in Counter(shapes).items():
            part = "feed-forward" if name.startswith(FEED_FORWARD) else "projections"
            one, mlp = WeightMatrix(name, part, inputs, outputs, copies, copies), self.layer.feed_forward
            made.append(one._replace(used=mlp.chosen) if one.of_experts and isinstance(mlp, Experts) else one)
        return made

    @property
    def other(self) -> int:
        """Parameters of one layer outside of its matrices: norms, biases, attention sinks."""
        return sum(prod(shape) for name, shape in self.shapes.items() if not is_product(name, shape))


def latent_flops(latent: Latent, pairs: int, known: int) -> int:
    """FLOPs of one head in one layer with latent entries. Either scores are made from entries, with matrices moved into
    queries and outputs (as when decoding), or keys and values are, those of `known` entries again: what is less."""
    rank, made = latent.rank, latent.plain + latent.value
    absorbed = 2 * (2 * rank + latent.rotated) * pairs
    return min(absorbed, 2 * (made + latent.rotated) * pairs + 2 * rank * made * known)
