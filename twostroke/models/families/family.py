"""The base class of families, the usual names in files, and parts that many families describe alike.

A family is described once for both formats. It reads a `ConfigSource` by the keys of config.json; `GGUF_KEYS` and
`Family.gguf_keys` translate them to the keys of GGUF files.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, ClassVar

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.feed_forward import Activation
from twostroke.models.formats.tensor import RawTensor

Transform = Callable[[RawTensor], RawTensor]


# Keys of all families: config.json's -> GGUF's without the architecture prefix (llama.cpp's llama-arch.cpp).
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # that may have biases


def with_biases(parts: dict[str, str]) -> dict[str, str]:
    """Names of a layer's tensors, and of the biases of its matrices."""
    return parts | {f"{part}_bias": parts[part].removesuffix("weight") + "bias" for part in MATRICES}


GGUF_OUTER = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
GGUF_PARTS = with_biases(
    {
        "attn_norm": "attn_norm.weight",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "o": "attn_output.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
    }
)
# For families with experts.
GGUF_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
MLP = ("gate", "up", "down")
GGUF_EXPERT_PARTS = {"router": "ffn_gate_inp.weight"} | {f"experts.{part}": f"ffn_{part}_exps.weight" for part in MLP}
GGUF_SHARED_PARTS = {f"shared.{part}": f"ffn_{part}_shexp.weight" for part in MLP}
HUGGINGFACE_PARTS = with_biases(
    {
        "attn_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj.weight",
        "k": "self_attn.k_proj.weight",
        "v": "self_attn.v_proj.weight",
        "o": "self_attn.o_proj.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    }
)
HUGGINGFACE_EXPERT_PARTS = {"router": "mlp.gate.weight"} | {
    f"experts.{part}": f"mlp.experts.{{}}.{part}_proj.weight" for part in MLP
}
GGUF_GUESSER = {
    "norm": "nextn.shared_head_norm.weight",
    "join.projection": "nextn.eh_proj.weight",
    "join.embed_norm": "nextn.enorm.weight",
    "join.hidden_norm": "nextn.hnorm.weight",
}
POST_NORMS_GGUF = {"attn_post_norm": "post_attention_norm.weight", "mlp_post_norm": "post_ffw_norm.weight"}

# The names where gate and up are one matrix.
FUSED_MLP_GGUF = GGUF_PARTS | {"gate": "ffn_up.weight"}
FUSED_MLP_HUGGINGFACE = HUGGINGFACE_PARTS | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight")

# The names in transformers' `activations.py`, several of which stand for one function.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
MAX_HEAD_DIM = 1 << 14
MAX_GROUPS = 64  # of experts


class Family:
    """A family of decoders: its keys and their defaults, the names of its tensors, and its layers."""

    name: ClassVar[str]  # its name in Twostroke and in messages
    gguf: ClassVar[str | None]  # its `general.architecture`; None if its GGUF files use another family's name
    model_types: ClassVar[tuple[str, ...]]  # its values of `model_type` in config.json
    transformers: ClassVar[str]  # its class in transformers, for config.json files that are written
    gguf_keys: ClassVar[Mapping[str, str]] = {}  # config.json's key -> GGUF's, in addition to `GGUF_KEYS`
    gguf_defaults: ClassVar[Mapping[str, Any]] = {}  # defaults of config.json's keys for GGUF files
    # whether its layers have latent entries (MLA), which GGUF's sizes of heads are those of
    latent: ClassVar[bool] = False
    # whether the head of multi-token prediction is a layer behind the last in directories
    guess_layers: ClassVar[bool] = False
    partial_rope: ClassVar[bool] = False  # whether a checkpoint may have a part of each head rotated
    # gguf_outer, huggingface_outer: the names of tensors outside of layers, in addition to the usual ones
    gguf_outer: ClassVar[Mapping[str, str]] = {}
    huggingface_outer: ClassVar[Mapping[str, str]] = {}
    # gguf_parts, huggingface_parts: Twostroke's names of a layer's tensors -> the format's names. `{}` stands for the
    # expert's number; an expert's name without it is one 3-D tensor of all experts. Matrices of one name follow one
    # another in that tensor.
    gguf_parts: ClassVar[Mapping[str, str]] = GGUF_PARTS
    huggingface_parts: ClassVar[Mapping[str, str]] = HUGGINGFACE_PARTS
    switches: ClassVar[Mapping[str, Any]] = {}  # fields of attention in all layers
    post_norms: ClassVar[bool] = False  # whether layers have norms behind their parts
    # gguf_guesser, huggingface_guesser: names of what a head of multi-token prediction has beside its layer, below the
    # layer's number or "mtp."; empty if the family's files have none
    gguf_guesser: ClassVar[Mapping[str, str]] = {}
    huggingface_guesser: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of config.json's keys: those of the nearest class that `defaults.toml` has, or the usual ones."""
        stated, names = _stated_defaults(), (getattr(one, "name", "") for one in type(self).__mro__)
        return next((stated[name] for name in names if name in stated), stated["usual"])

    def describe(self, source: ConfigSource) -> ModelConfig:
        """Describe the model: as the next four methods say, unless a family has layers of another kind.

        Raises UnsupportedArchitecture for a variant that is not implemented, CheckpointError for bad metadata.
        """
        windows = self.windows(source)
        attentions = {window: self.attention(source, window) for window in dict.fromkeys(windows)}
        layers = [
            Layer(attentions[window], self.feed_forward(source, i), self.post_norms) for i, window in enumerate(windows)
        ]
        return model_of(source, self, layers, **self.scales(source))

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        """Each layer's window."""
        return (None,) * source.num_layers

    def attention(self, source: ConfigSource, window: int | None) -> Attention:
        """The attention of layers with this window."""
        return attention_of(source, window=window, **self.switches)

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        """The MLP or the experts of a layer."""
        return mlp_of(source)

    def scales(self, source: ConfigSource) -> Mapping[str, float]:
        """Further fields of the model: its factors."""
        return {}

    def stored_layer(self, config: ModelConfig, layer: int, part: str) -> int:
        """The number that files have for a layer's part, where it is not the layer's."""
        return layer

    def row_orders(self, config: ModelConfig, format: str) -> dict[str, np.ndarray]:
        """Where the rows of matrices that are one tensor in the file are in it, by the first one's Twostroke name, if
        they do not follow one another."""
        return {}

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Conversions, by Twostroke name, that a loader applies to tensors of a format ("gguf", "huggingface")."""
        return {}


@cache
def _stated_defaults() -> dict[str, dict[str, Any]]:
    tables = tomllib.loads(files("twostroke.models.families").joinpath("defaults.toml").read_text())
    for table in tables.values():  # a table is like one before it
        stated = tables.get(table.pop("like", ""), {}) | dict.fromkeys(table.pop("null", ())) | table
        table.update(stated)
    return tables


def model_of(source: ConfigSource, family: Family, layers: Sequence[Layer], **scales: Any) -> ModelConfig:
    """The model of these layers; `scales` are further fields.

    Raises CheckpointError for more experts than the files have matrices for.
    """
    mixtures = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
    experts = sum((len(one.inputs) + 1) * one.count for one in mixtures)
    if experts > source.num_matrices:
        raise CheckpointError(f"{source.path}: experts of {experts} matrices, and the files have {source.num_matrices}")
    scales.setdefault("norm_eps", source.number("rms_norm_eps"))
    return ModelConfig(
        architecture=family.name,
        vocab_size=source.vocab_size,
        hidden_size=source.integer("hidden_size"),
        max_position=source.integer("max_position_embeddings"),
        layers=tuple(layers),
        tied=source.tied,
        **scales,
    )


def attention_of(
    source: ConfigSource, kind: str | None = None, kv_heads: int | None = None, **switches: Any
) -> Attention:
    """Attention with the usual scale and the RoPE of one kind of layers; `switches` are further fields.

    Biases are those that the checkpoint chooses, unless `switches` say otherwise.
    """
    switches = {"bias": source.biases >= {"q", "k", "v"}, "output_bias": "o" in source.biases} | switches
    heads = source.integer("num_attention_heads")
    kv_heads = kv_heads or source.integer("num_key_value_heads", default=heads)
    head_dim = source.integer("head_dim", default=source.integer("hidden_size") // heads or None, limit=MAX_HEAD_DIM)
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(f"{source.path}: {heads} heads of {head_dim} and {kv_heads} KV heads do not fit")
    return Attention(heads, kv_heads, head_dim, head_dim**-0.5, source.rope(head_dim, kind), **switches)


def mlp_of(source: ConfigSource, bias: bool | None = False) -> GatedMLP:
    """The gated MLP with SiLU that most families have; a `bias` of None is the checkpoint's choice."""
    bias = source.biases >= set(MLP) if bias is None else bias
    return GatedMLP(source.integer("intermediate_size"), activation_of(source, "hidden_act", "silu"), bias)


def experts_of(source: ConfigSource, size_key: str, normalized: bool) -> Experts:
    """Experts with SiLU, all of the size that `size_key` says."""
    # transformers 5 writes the number of experts of some families under another key.
    keys = (key for key in ("num_local_experts", "n_routed_experts") if source.get(key))
    count = source.integer(next(keys, "num_experts"), limit=1 << 16)
    chosen = source.integer("num_experts_per_tok")
    if chosen > count:
        raise source.wrong("num_experts_per_tok", f"at most the {count} experts")
    activation = activation_of(source, "hidden_act", "silu")
    return Experts(count, chosen, source.integer(size_key), activation, normalized)


def in_groups(source: ConfigSource, experts: Experts, sigmoid: bool) -> Experts:
    """Experts that are chosen from some groups. Raises UnsupportedArchitecture for groups by their best one alone."""
    if source.get("n_group") in (None, 0, 1) or source.get("n_group") == source.get("topk_group"):
        return experts
    groups, chosen = source.integer("n_group", limit=MAX_GROUPS + 1), source.integer("topk_group")
    size = experts.count // groups
    if experts.count % groups or size < 2 or not experts.chosen <= chosen * size < experts.count:
        raise source.wrong("topk_group", f"some of {groups} groups, with {experts.chosen} of {experts.count} experts")
    if not sigmoid:
        raise source.unsupported(f"experts that are chosen from {groups} groups by the best expert of each")
    return replace(experts, groups=groups, groups_chosen=chosen)


def activation_of(source: ConfigSource, key: str, usual: Activation) -> Activation:
    """The activation that config.json names, or the family's usual one: GGUF files do not name it.

    Raises UnsupportedArchitecture for one that no backend computes.
    """
    if source.format == "gguf":
        return usual
    found = str(source.get(key))
    if found not in ACTIVATIONS:
        raise source.unsupported(f"activation {found!r}")
    return ACTIVATIONS[found]
