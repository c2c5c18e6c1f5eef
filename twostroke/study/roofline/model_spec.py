"""The sizes of a decoder, enough to count its parameters, its KV and the work of its steps. No weights are needed.

A `ModelConfig` describes what the engine can run. A `ModelSpec` describes any decoder by sizes alone, also those
that the engine cannot run (GPT-3, gpt-oss), so that plans can be made for them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import NamedTuple

from twostroke.errors import InvalidRequest
from twostroke.models.config import Attention, Experts, Layer, ModelConfig, is_weight_matrix, tensor_shapes
from twostroke.models.cost import SequenceRows, attended, experts_read

MAX_PROMPT = 1 << 40  # tokens of a prompt, where a search for the length at which scores dominate ends


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


@dataclass(frozen=True)
class LayerKind:
    """`count` layers of the same sizes.

    Attributes:
        intermediate: intermediate size of the MLP, or of each expert.
        window: a query attends to the last `window` entries; None for all.
        gated: whether the MLP has three matrices (gate, up, down) or two (up, down).
        experts, chosen: experts in a layer, and those that each token passes through; 1 and 1 for an MLP.
        shared: intermediate size of an MLP that every token passes beside its experts; 0 for none.
        key_is_value: keys and values are the same vectors, stored once.
        entry_matrices: of K and V: 1 if the matrix of K makes V too, 0 if another layer's entries are read.
        inputs: numbers that it gets of each token (per-layer embeddings).
        other: parameters of one layer outside of its matrices: norms, biases, attention sinks.
    """

    count: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    window: int | None = None
    gated: bool = True
    experts: int = 1
    chosen: int = 1
    shared: int = 0
    key_is_value: bool = False
    entry_matrices: int = 2
    inputs: int = 0
    other: int = 0

    @property
    def kv_values(self) -> int:
        """Numbers that one layer stores for an entry: K and V of each KV head, or K alone where K = V."""
        return (1 if self.key_is_value else 2) * self.kv_heads * self.head_dim if self.entry_matrices else 0

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query-key pair in one layer, all heads: the score, and the weighted value."""
        return 4 * self.heads * self.head_dim

    def matrices(self, hidden: int) -> list[WeightMatrix]:
        """The matrices of one layer."""
        q, kv, size = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        mixture = (self.experts, self.chosen)
        found = [WeightMatrix("Q", "projections", hidden, q)]
        if self.entry_matrices:
            found.append(WeightMatrix("K", "projections", hidden, kv))
        if not self.key_is_value and self.entry_matrices > 1:
            found.append(WeightMatrix("V", "projections", hidden, kv))
        found.append(WeightMatrix("O", "projections", q, hidden))
        if self.experts > 1:
            found.append(WeightMatrix("router", "feed-forward", hidden, self.experts))
        if self.gated:
            found.append(WeightMatrix("gate", "feed-forward", hidden, size, *mixture))
        if self.inputs:
            found += [WeightMatrix(name, "feed-forward", hidden, self.inputs) for name in ("inputs", "input gate")]
            found.append(WeightMatrix("input projection", "feed-forward", self.inputs, hidden))
        if self.shared:
            found += [WeightMatrix(f"shared {name}", "feed-forward", hidden, self.shared) for name in ("gate", "up")]
            found.append(WeightMatrix("shared down", "feed-forward", self.shared, hidden))
        return [
            *found,
            WeightMatrix("up", "feed-forward", hidden, size, *mixture),
            WeightMatrix("down", "feed-forward", size, hidden, *mixture),
        ]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder by its sizes.

    Attributes:
        name: what it is called in plans.
        other: parameters outside of layers and of the vocabulary's matrices: the last norm, learned positions.
        weights: the format in which it is published, a key of `weights.FORMATS`, or "stored" for an opened file.
        source: where its numbers are from.
        published: number of parameters that its publisher states; None if unknown.
        config: the engine's description, if the engine knows the family.
        kv_value_bytes: bytes of a number in the KV cache, 2 for bfloat16.
    """

    name: str
    hidden: int
    vocab: int
    max_position: int
    layers: tuple[LayerKind, ...]
    tied: bool = False
    other: int = 0
    weights: str = "bf16"
    source: str = ""
    published: int | None = None
    config: ModelConfig | None = None
    kv_value_bytes: float = 2

    def with_kv_bits(self, bits: int) -> "ModelSpec":
        """The model with so many bits of a number in its KV cache. Raises InvalidRequest unless they are 16 or 8."""
        if bits not in (16, 8):
            raise InvalidRequest(f"a number in the KV cache has 16 or 8 bits, not {bits}")
        return replace(self, kv_value_bytes=bits / 8)

    @property
    def num_layers(self) -> int:
        return sum(kind.count for kind in self.layers)

    @property
    def head(self) -> WeightMatrix:
        return WeightMatrix("head", "head", self.hidden, self.vocab)

    def matrices(self) -> Iterator[tuple[int, WeightMatrix]]:
        """Pairs (number of layers, matrix), without the embedding and the head."""
        for kind in self.layers:
            for matrix in kind.matrices(self.hidden):
                yield kind.count, matrix

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of all layers."""
        return sum(count * matrix.parameters for count, matrix in self.matrices())

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding and the head, which are one matrix if tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @cached_property
    def other_parameters(self) -> int:
        """Norms, biases, sinks and learned positions."""
        return self.other + sum(kind.count * kind.other for kind in self.layers)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.vocabulary_parameters + self.other_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with or looks up: chosen experts alone, and one embedding."""
        matrices = sum(count * matrix.used * matrix.inputs * matrix.outputs for count, matrix in self.matrices())
        return matrices + self.head.parameters + self.hidden + self.other_parameters

    def kv_bytes(self, entries: int) -> int:
        """Bytes of the KV of one sequence of `entries` entries; a layer with a window keeps its window alone.

        All counts of KV memory are made here.
        """
        kept = ((kind, min(entries, kind.window or entries)) for kind in self.layers)
        return ceil(self.kv_value_bytes * sum(kind.count * kind.kv_values * count for kind, count in kept))

    @property
    def kv_values(self) -> int:
        """Numbers that all layers store for a new entry."""
        return sum(kind.count * kind.kv_values for kind in self.layers)

    @cached_property
    def row_flops(self) -> int:
        """FLOPs of all matrices of the layers for one row."""
        return sum(count * matrix.row_flops for count, matrix in self.matrices())

    def attention_flops(self, rows: SequenceRows) -> int:
        """FLOPs of scores and weighted values: 4 x heads x head_dim for each query-key pair and layer."""
        return sum(kind.count * kind.pair_flops * attended(rows, kind.window)[0] for kind in self.layers)

    def prefill_flops(self, tokens: int, cached: int = 0) -> dict[str, int]:
        """FLOPs of a prefill by part: projections, scores, feed-forward, and the head for one token."""
        parts = {"projections": 0, "scores": self.attention_flops(SequenceRows(tokens, cached)), "feed-forward": 0}
        for count, matrix in self.matrices():
            parts[matrix.part] += count * matrix.row_flops * tokens
        return parts | {"head": self.head.row_flops}

    def crossover(self) -> int | None:
        """The shortest prompt whose scores take more FLOPs than all matrices of the layers; None if none does.

        Without windows, pair_flops n (n + 1) / 2 > row_flops n. Layers with windows grow linearly, and may never.
        """

        def dominate(tokens: int) -> bool:
            return self.attention_flops(SequenceRows(tokens)) > self.row_flops * tokens

        found = 1 + bisect_left(range(1, MAX_PROMPT + 1), True, key=dominate)
        return found if found <= MAX_PROMPT else None


def spec_of_config(name: str, config: ModelConfig, source: str = "", weights: str = "bf16") -> ModelSpec:
    """The sizes of a model that the engine can describe."""
    kinds = tuple(_kind(layer, config, count) for layer, count in Counter(config.layers).items())
    table = config.token_inputs * (config.vocab_size * config.num_layers + 1)  # of per-layer embeddings, and a norm
    return ModelSpec(
        name=name,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        max_position=config.max_position,
        layers=kinds,
        tied=config.tied,
        other=config.hidden_size + table,
        weights=weights,
        source=source,
        config=config,
    )


def _kind(layer: Layer, config: ModelConfig, count: int) -> LayerKind:
    if not isinstance(layer.mixer, Attention):
        raise InvalidRequest(f"plans do not count recurrent layers yet, which {config.architecture} has")
    attention, feed_forward = layer.mixer, layer.feed_forward
    shapes = tensor_shapes(config)
    prefix = f"layers.{config.layers.index(layer)}."
    other = sum(
        prod(shape)
        for name, shape in shapes.items()
        if name.startswith(prefix) and not is_weight_matrix(name, shape) and len(shape) == 1
    )
    experts = feed_forward if isinstance(feed_forward, Experts) else None
    return LayerKind(
        count=count,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate=feed_forward.intermediate_size,
        window=attention.window,
        experts=experts.count if experts else 1,
        chosen=experts.chosen if experts else 1,
        shared=experts.shared_size if experts else 0,
        entry_matrices=len(dict.fromkeys(attention.projections)) - 1,
        inputs=config.token_inputs,
        other=other,
    )
