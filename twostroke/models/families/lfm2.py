"""LFM2 and LFM2.5: short gated convolutions between layers of attention (Liquid AI 2025, arXiv:2511.23404)."""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    HUGGINGFACE_PARTS,
    Family,
    attention_of,
    experts_of,
    model_of,
)
from twostroke.models.families.hybrid_layers import FULL, hybrid_kinds, kv_heads
from twostroke.models.recurrent import ShortConvolution

SIGMOID = 2  # of experts, in GGUF files


class Lfm2(Family):
    name = gguf = "lfm2"
    model_types: ClassVar[tuple[str, ...]] = ("lfm2",)
    transformers = "Lfm2ForCausalLM"
    huggingface_outer: ClassVar = {"norm": "embedding_norm.weight"}
    huggingface_parts: ClassVar = (
        HUGGINGFACE_PARTS
        | dict.fromkeys(("state_b", "state_c", "state_x"), "conv.in_proj.weight")
        | {"conv": "conv.conv.weight", "state_o": "conv.out_proj.weight", "o": "self_attn.out_proj.weight"}
        | {"q_norm": "self_attn.q_layernorm.weight", "k_norm": "self_attn.k_layernorm.weight"}
        | {"attn_norm": "operator_norm.weight", "mlp_norm": "ffn_norm.weight"}
        | {part: f"feed_forward.{name}.weight" for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))}
    )
    gguf_keys: ClassVar = {"conv_L_cache": "shortconv.l_cache", "norm_eps": "attention.layer_norm_rms_epsilon"}
    gguf_outer: ClassVar = {"norm": "token_embd_norm.weight"}
    gguf_parts: ClassVar = (
        GGUF_PARTS
        | dict.fromkeys(("state_b", "state_c", "state_x"), "shortconv.in_proj.weight")
        | {"conv": "shortconv.conv.weight", "state_o": "shortconv.out_proj.weight"}
    )

    def describe(self, source: ConfigSource) -> ModelConfig:
        if source.get("conv_bias"):
            raise source.unsupported("conv_bias")
        kinds = source.get("layer_types")
        if kinds is None and isinstance(full := source.get("full_attn_idxs"), list):
            kinds = [FULL if i in full else "conv" for i in range(source.num_layers)]
        attention = attention_of(source, qk_norm=True, kv_heads=kv_heads(source))
        width = source.integer("conv_L_cache", limit=256)
        convolution = ShortConvolution(source.integer("hidden_size"), width)
        layers = [
            Layer(attention if kind == FULL else convolution, self.feed_forward(source, index))
            for index, kind in enumerate(hybrid_kinds(source, kinds))
        ]
        return model_of(source, self, layers, norm_eps=source.number("norm_eps"))

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        size = source.integer("block_ff_dim", default=source.integer("intermediate_size"))
        if source.format == "gguf" or not source.get("block_auto_adjust_ff_dim"):
            return GatedMLP(size)
        size, unit = int(2 * size / 3), source.integer("block_multiple_of")
        if (factor := source.get("block_ffn_dim_multiplier")) is not None:
            size = int(source.checked("block_ffn_dim_multiplier", factor) * size)
        return GatedMLP(-(-size // unit) * unit)


class Lfm2MoE(Lfm2):
    """A mixture of experts behind the first layers."""

    name = gguf = "lfm2moe"
    model_types = ("lfm2_moe",)
    transformers = "Lfm2MoeForCausalLM"
    huggingface_parts: ClassVar = {
        **Lfm2.huggingface_parts,
        "router": "feed_forward.gate.weight",
        "selection_bias": "feed_forward.expert_bias",
        "experts.gate": "feed_forward.experts.{}.w1.weight",
        "experts.up": "feed_forward.experts.{}.w3.weight",
        "experts.down": "feed_forward.experts.{}.w2.weight",
    }
    gguf_keys: ClassVar = {**Lfm2.gguf_keys, **GGUF_EXPERT_KEYS, "num_dense_layers": "leading_dense_block_count"}
    gguf_defaults: ClassVar = {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    gguf_parts: ClassVar = {**Lfm2.gguf_parts, **GGUF_EXPERT_PARTS, "selection_bias": "exp_probs_b.bias"}

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        dense = source.get("num_dense_layers")
        if type(dense) is not int or not 0 <= dense <= source.num_layers:
            raise source.wrong("num_dense_layers", f"from 0 to {source.num_layers}")
        if layer < dense:
            return GatedMLP(source.integer("intermediate_size"))
        if source.get("routed_scaling_factor") != 1 or source.get("expert_gating_func") not in (None, SIGMOID):
            raise source.unsupported("factors of experts, or weights that are not sigmoids")
        found = experts_of(source, "moe_intermediate_size", bool(source.get("norm_topk_prob")))
        return replace(found, sigmoid=True, selection_bias=bool(source.get("use_expert_bias")))
