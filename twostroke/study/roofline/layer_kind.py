"""One kind of layers: its matrices, and what its attention or its state computes, reads and keeps."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from twostroke.models.config import Attention, Experts, Layer, ModelConfig
from twostroke.models.cost import SequenceRows, attended, experts_read, recurrent
from twostroke.models.kv_formats import KVFormat
from twostroke.models.recurrent import RecurrentMixer
from twostroke.models.tensor_shapes import ROUTER, is_weight_matrix, tensor_shapes


class WeightMatrix(NamedTuple):
    """A matrix of one layer, or the head: `copies` of them, of which each row is multiplied with `used`."""

    name: str
    part: str  # "projections", "feed-forward" or "head"
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1

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


class LatentSizes(NamedTuple):
    """Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434): an entry is one vector for all heads, of
    `kv` numbers, from which each head's key and value are made, and of `rope` numbers of a rotated key.
    """

    # q, kv: ranks of queries (0 if they are made in one product), and of keys and values
    q: int
    kv: int
    # nope, rope, v: numbers of a head's key that are made and that are rotated, and of its value
    nope: int
    rope: int
    v: int

    def head_flops(self, pairs: int, known: int) -> int:
        """FLOPs of one head in one layer. Either scores are made from entries, with matrices moved into queries and
        outputs (as when decoding), or keys and values are, those of `known` entries again: what is less."""
        absorbed = 2 * (2 * self.kv + self.rope) * pairs
        return min(absorbed, 2 * (self.nope + self.rope + self.v) * pairs + 2 * self.kv * (self.nope + self.v) * known)


@dataclass(frozen=True)
class LayerKind:
    """`count` layers of the same sizes."""

    count: int
    # heads, kv_heads, head_dim: of attention; of a recurrent layer, the heads of its keys, and their size
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # intermediate size of the MLP, or of each expert; 0 if there is neither
    window: int | None = None  # a query attends to the last `window` entries; None for all
    gated: bool = True  # whether the MLP has three matrices (gate, up, down) or two (up, down)
    # experts, chosen: experts in a layer, and those that each token passes through; 1 and 1 for an MLP
    experts: int = 1
    chosen: int = 1
    shared: int = 0  # intermediate size of an MLP that every token passes beside its experts; 0 for none
    key_is_value: bool = False  # keys and values are the same vectors, stored once
    entry_matrices: int = 2  # of K and V: 1 if the matrix of K makes V too, 0 if another layer's entries are read
    output_gate: bool = False  # whether a further matrix gates what is attended to
    state: RecurrentMixer | None = None  # of a recurrent layer, in place of attention
    latent: LatentSizes | None = None  # of MLA; it has one KV head, whose size is that of an entry, and `key_is_value`
    inputs: int = 0  # numbers that it gets of each token (per-layer embeddings)
    # whether its inputs are a projection of an embedding and a hidden state (multi-token prediction)
    joined: bool = False
    other: int = 0  # parameters of one layer outside of its matrices: norms, biases, attention sinks

    @property
    def kv_vectors(self) -> int:
        """Vectors that one layer stores for an entry: K and V of each KV head, or K alone where K = V."""
        if self.state is not None or not self.entry_matrices:
            return 0
        return (1 if self.key_is_value else 2) * self.kv_heads

    def entry_bytes(self, stored: KVFormat) -> int:
        """Bytes of an entry in one layer, with its scales."""
        return self.kv_vectors * stored.head_bytes(self.head_dim) // 2

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query-key pair in one layer with attention, all heads: the score, and the weighted value."""
        return 4 * self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Numbers of a row that the output projection is given."""
        if self.latent is not None:
            return self.heads * self.latent.v
        return self.heads * self.head_dim if self.state is None else self.state.v_size

    def mixing(self, rows: SequenceRows, stored: KVFormat) -> tuple[int, float]:
        """What a sequence's rows take in one layer beside its matrices: FLOPs, and bytes of KV, rows and states."""
        if self.state is not None:
            work = recurrent(rows, self.state)
            return work.flops, work.bytes
        pairs, entries = attended(rows, self.window)
        flops = self.pair_flops * pairs
        if self.latent is not None:
            flops = self.heads * self.latent.head_flops(pairs, rows.context)
        return flops, self.entry_bytes(stored) * entries

    def matrices(self, hidden: int) -> list[WeightMatrix]:
        """The matrices of one layer."""
        size, mixture = self.intermediate, (self.experts, self.chosen)
        found = [WeightMatrix(name, "projections", hidden, made) for name, made in self._projections.items()]
        if self.latent is not None:
            q, kv, nope, rope, v = self.latent
            if q:
                found.append(WeightMatrix("heads of Q", "projections", q, self.heads * (nope + rope)))
            found.append(WeightMatrix("heads of K and V", "projections", kv, self.heads * (nope + v)))
        found.append(WeightMatrix("O", "projections", self.mixed, hidden))
        if self.joined:
            found.append(WeightMatrix("join", "projections", 2 * hidden, hidden))
        if self.experts > 1:
            found.append(WeightMatrix("router", "feed-forward", hidden, self.experts))
        if self.gated and size:
            found.append(WeightMatrix("gate", "feed-forward", hidden, size, *mixture))
        if self.inputs:
            found += [WeightMatrix(name, "feed-forward", hidden, self.inputs) for name in ("inputs", "input gate")]
            found.append(WeightMatrix("input projection", "feed-forward", self.inputs, hidden))
        if self.shared:
            names = ("gate", "up") if self.gated else ("up",)
            found += [WeightMatrix(f"shared {name}", "feed-forward", hidden, self.shared) for name in names]
            found.append(WeightMatrix("shared down", "feed-forward", self.shared, hidden))
        if size:
            found.append(WeightMatrix("up", "feed-forward", hidden, size, *mixture))
            found.append(WeightMatrix("down", "feed-forward", size, hidden, *mixture))
        return found

    @property
    def _projections(self) -> dict[str, int]:
        """What is made of a layer's inputs for its mixer, and its numbers."""
        if self.state is not None:
            return self.state.projections
        if self.latent is not None:
            whole = self.heads * (self.latent.nope + self.latent.rope)
            return {"Q": self.latent.q or whole, "entry": self.head_dim}
        kv, names = self.kv_heads * self.head_dim, ("K", "V")[: 1 if self.key_is_value else self.entry_matrices]
        gate = {"output gate": self.mixed} if self.output_gate else {}
        return {"Q": self.mixed} | dict.fromkeys(names, kv) | gate


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kinds of layers of a model that the engine can describe."""
    return tuple(_kind(layer, config, count) for layer, count in Counter(config.layers).items())


def _kind(layer: Layer, config: ModelConfig, count: int) -> LayerKind:
    feed_forward = layer.feed_forward
    prefix = f"layers.{config.layers.index(layer)}."
    other = sum(
        prod(shape)
        for name, shape in tensor_shapes(config).items()
        if name.startswith(prefix) and not is_weight_matrix(name, shape) and not name.endswith(f".{ROUTER}")
    )
    experts = feed_forward if isinstance(feed_forward, Experts) else None
    return LayerKind(
        count=count,
        intermediate=feed_forward.intermediate_size,
        gated="gate" in feed_forward.inputs,
        experts=experts.count if experts else 1,
        chosen=experts.chosen if experts else 1,
        shared=experts.shared_size if experts else 0,
        inputs=config.token_inputs,
        other=other,
        **_mixer(layer.mixer),
    )


def _mixer(mixer: Attention | RecurrentMixer) -> dict[str, Any]:
    """The fields of a `LayerKind` that its mixer determines."""
    if isinstance(mixer, RecurrentMixer):
        return {"heads": mixer.num_k_heads, "kv_heads": mixer.num_k_heads, "head_dim": mixer.k_dim, "state": mixer}
    latent = None
    if (made := mixer.latent) is not None:
        latent = LatentSizes(made.query_rank or 0, made.rank, made.plain, made.rotated, made.value)
    return {
        "latent": latent,
        "key_is_value": latent is not None,
        "heads": mixer.num_heads,
        "kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "window": mixer.window,
        "entry_matrices": len(dict.fromkeys(mixer.projections)) - 1,
        "output_gate": mixer.output_gate,
    }
