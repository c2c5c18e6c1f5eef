"""The description of a decoder-only transformer, the same for every family.

A model is a list of layers. A layer is an attention and a feed-forward, each a small record of sizes and switches. A
family (`models.families`) makes the description from a checkpoint's metadata. Loaders, the cost model, quantization,
pruning and backends read only the description and know no family by name.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from twostroke.models.feed_forward import Experts, GatedMLP
from twostroke.models.latent import Latent
from twostroke.models.recurrent import RecurrentMixer
from twostroke.models.rope import Rope
from twostroke.models.stable_repr import LATER, StableRepr


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their position: by 1 + beta * log(1 + floor(position / length)).

    Llama 4's attention temperature (Nakanishi 2025, arXiv:2501.19399, scales all positions alike); Ministral 3 has it.
    """

    beta: float
    length: int

    def factors(self, positions: np.ndarray) -> np.ndarray:
        """The factor of queries at each position, float32."""
        steps = np.floor(positions.astype(np.float64) / self.length)  # float64: rounded alike on every processor
        return (1 + self.beta * np.log(1 + steps)).astype(np.float32)


@dataclass(frozen=True, repr=False)
class Attention(StableRepr):
    """Grouped-query attention with rotary positions.

    Attributes:
        output_bias: whether the output projection has a bias (Llama and others with `attention_bias`).
        whole_norm: whether that norm is over all heads of q together, and of k (OLMo 2).
        source: the layer whose K and V this one reads, of the same window and shape; None: it has its own.
        growth: how queries grow with their position; None: they do not.
        sink_logits: whether each query head has a learned logit that takes part in the softmax and has no value
            (gpt-oss, after Xiao et al. 2023, arXiv:2309.17453): weights of the keys sum to less than 1.
        value_norm: whether each head of v passes an RMSNorm without weights (Gemma 4).
        keys_as_values: whether v is k before its norm and RoPE, so that there is no matrix of v (Gemma 4).
        output_gate: whether what is attended to is multiplied by the sigmoid of a further projection (Qwen3-Next).
        latent: what entries are that are one vector for all heads, with one KV head of their size; None: K and V.
        both_ways: whether a query attends to the keys behind it too, at positions < p + window (EmbeddingGemma). Then
            a text enters in one step, and nothing is decoded.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of query-key products
    rope: Rope  # `NO_ROPE` if queries and keys are not rotated (SmolLM3, some layers)
    window: int | None = None  # a query at position p attends to keys at positions > p - window; None for all keys
    bias: bool = False  # whether q, k and v have biases (Qwen2)
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE (Qwen3, Gemma 3)
    output_bias: bool = field(default=False, repr=False)  # identities contain the repr of older versions
    source: int | None = field(default=None, repr=False, metadata=LATER)
    whole_norm: bool = field(default=False, repr=False, metadata=LATER)
    growth: QueryGrowth | None = field(default=None, repr=False, metadata=LATER)
    sink_logits: bool = field(default=False, repr=False, metadata=LATER)
    value_norm: bool = field(default=False, repr=False, metadata=LATER)
    keys_as_values: bool = field(default=False, repr=False, metadata=LATER)
    output_gate: bool = field(default=False, repr=False, metadata=LATER)
    latent: Latent | None = field(default=None, repr=False, metadata=LATER)
    both_ways: bool = field(default=False, repr=False, metadata=LATER)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The shape of K and of V of an entry: KV heads, head_dim."""
        return self.num_kv_heads, self.head_dim

    @property
    def kv_values(self) -> int:
        """Numbers of K and V of an entry; of one that is both once."""
        return (2 if self.latent is None else 1) * self.num_kv_heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Numbers of a row that the output projection is given."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value)

    @property
    def projections(self) -> tuple[str, ...]:
        """The matrices of q, k and v, in this order; q alone if entries are another layer's. With latent entries those
        that are multiplied by the layer's input."""
        if self.latent is not None:
            return ("q" if self.latent.query_rank is None else "q_down", "kv_down")
        return ("q",) if self.source is not None else ("q", "k", "k" if self.keys_as_values else "v")


@dataclass(frozen=True, repr=False)
class Layer(StableRepr):
    """A mixer of tokens, then feed-forward, each after an RMSNorm and added to the residual stream."""

    # attention, or what has a state in its place
    mixer: Attention | RecurrentMixer = field(metadata={"shown": "attention"})
    feed_forward: GatedMLP | Experts
    post_norms: bool = False  # whether the outputs of both also pass an RMSNorm before they are added (Gemma 3)
    # whether there are the norms before them, which OLMo 2 lacks
    pre_norms: bool = field(default=True, repr=False, metadata=LATER)
    # whether the residual stream is multiplied by a learned number at the end (Gemma 4)
    scaled: bool = field(default=False, repr=False, metadata=LATER)
    # whether the mixer reads what that of the layer before has read, after the same norm, and not what came of it: both
    # are beside each other (Falcon-H1). That layer has no feed-forward.
    beside: bool = field(default=False, repr=False, metadata=LATER)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms before its parts."""
        alone = not isinstance(self.feed_forward, Experts) and not self.feed_forward.intermediate_size
        parts = {"attn_norm": not self.beside, "mlp_norm": not alone}
        return tuple(name for name, present in parts.items() if present and self.pre_norms)

    @property
    def attention(self) -> Attention:
        """The mixer of a layer with attention. Raises ValueError if it has a state instead."""
        if not isinstance(self.mixer, Attention):
            raise ValueError("this layer has a state in place of attention")
        return self.mixer


@dataclass(frozen=True, repr=False)
class ModelConfig(StableRepr):
    """One model. Raises ValueError if a layer reads the K and V of one that has none of the same window and shape."""

    architecture: str  # the family's name
    vocab_size: int
    hidden_size: int
    max_position: int
    norm_eps: float
    layers: tuple[Layer, ...]
    tied: bool = False  # whether the head is the embedding matrix
    embedding_scale: float = 1.0  # factor of embeddings (Gemma: the square root of hidden_size)
    # factor of what attention and feed-forward add to the residual stream (Granite, after Yang et al. 2022,
    # arXiv:2203.03466).
    residual_scale: float = field(default=1.0, repr=False, metadata=LATER)
    logit_scale: float = field(default=1.0, repr=False, metadata=LATER)  # factor of logits (Granite)
    # bound c of query-key products s, which become c tanh(s / c) (Gemma 2); None for none
    score_cap: float | None = field(default=None, repr=False, metadata=LATER)
    logit_cap: float | None = field(default=None, repr=False, metadata=LATER)  # the same for logits
    # how many numbers each layer gets of each token, besides the residual stream; 0 for none (per-layer embeddings of
    # Gemma 3n and 4). At its end a layer adds norm(projection(activation(gate x) * numbers)) to the stream. The numbers
    # are those of a table, and of a projection of the token's embedding.
    token_inputs: int = field(default=0, repr=False, metadata=LATER)
    # whether rows begin with a projection of the token's embedding and of a hidden state of another model, each after a
    # norm: a head that guesses further tokens (multi-token prediction, DeepSeek-AI 2024, arXiv:2412.19437, section 2.2)
    takes_hidden: bool = field(default=False, repr=False, metadata=LATER)
    # of matrices, by the name of a layer's part, for a family that multiplies them on load (Falcon-H1)
    factors: tuple[tuple[str, float], ...] = field(default=(), repr=False, metadata=LATER)
    # whether each layer's K and V have pages of their own, so that layers may hold other numbers of entries
    # (`kv.entries_by_head`)
    layers_apart: bool = field(default=False, repr=False, metadata=LATER)

    def __post_init__(self) -> None:
        for index, one in self.attention_layers.items():
            if one.source is None:
                continue
            made = self.attention_layers.get(one.source, one) if 0 <= one.source < index else one
            if made.source is not None or (made.window, made.kv_shape) != (one.window, one.kv_shape):
                raise ValueError(f"layer {index} cannot read the K and V of layer {one.source}")

    def limited(self, length: int) -> "ModelConfig":
        """The model for sequences of at most `length` tokens, no more than its context."""
        mixers = [one.mixer for one in self.layers]
        mixers = [replace(one, rope=one.rope.within(length)) if isinstance(one, Attention) else one for one in mixers]
        layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(self.layers, mixers, strict=True))
        return replace(self, max_position=length, layers=layers)

    @cached_property
    def attention_layers(self) -> dict[int, Attention]:
        """The layers with attention, by index."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: one for index, one in mixers if isinstance(one, Attention)}

    @cached_property
    def state_layers(self) -> dict[int, RecurrentMixer]:
        """The layers with a state instead, by index."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: one for index, one in mixers if isinstance(one, RecurrentMixer)}

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The layers with attention."""
        return tuple(self.attention_layers.values())

    @property
    def latent(self) -> bool:
        """Whether any layer has latent entries."""
        return any(one.latent is not None for one in self.attentions)

    @property
    def both_ways(self) -> bool:
        """Whether texts enter in one step each, and are embedded alone: attention is in both directions."""
        return any(one.both_ways for one in self.attentions)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def uniform(self) -> bool:
        """Whether all layers have as many heads of one size."""
        return len({(one.num_heads, one.kv_shape) for one in self.attentions}) == 1

    @property
    def num_heads(self) -> int:
        """Query heads of the first layer with attention, as are the other numbers of heads."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attentions[0].head_dim

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The RoPE of each layer with attention."""
        return tuple(attention.rope for attention in self.attentions)

    @cached_property  # asked for at every stroke
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer with attention, or None."""
        return tuple(attention.window for attention in self.attentions)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The layer whose K and V each layer with attention reads; empty if each layer reads its own."""
        found = tuple(i if one.source is None else one.source for i, one in self.attention_layers.items())
        return () if found == tuple(range(len(found))) else found

    @property
    def head_tensor(self) -> str:
        """The Twostroke name of the head's matrix."""
        return "embed" if self.tied else "head"
