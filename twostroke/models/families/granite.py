"""Granite: factors of embeddings, of attention, of what layers add, and of logits (IBM 2024, after muP); and Granite 4.

GGUF files of Granite 4 without Mamba layers say `granite`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    GGUF_SHARED_PARTS,
    HUGGINGFACE_PARTS,
    MLP,
    activation_of,
    attention_of,
    experts_of,
    mlp_of,
    model_of,
)
from twostroke.models.families.hybrid_layers import FULL, hybrid_kinds, kv_heads
from twostroke.models.families.llama import Llama
from twostroke.models.families.mamba2 import MAMBA2_GGUF, MAMBA2_GGUF_KEYS, Mamba2Family, mamba2_of, mamba2_parts
from twostroke.models.rope import NO_ROPE


class Granite(Llama):
    name = gguf = "granite"
    model_types: ClassVar[tuple[str, ...]] = ("granite",)
    transformers = "GraniteForCausalLM"
    gguf_keys: ClassVar = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    gguf_defaults: ClassVar = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        return (None,) * source.num_layers

    def attention(self, source: ConfigSource, window: int | None) -> Attention:
        attention = self._scaled(source, attention_of(source))
        turned = source.format != "gguf" or source.get("rope.scaling.finetuned") is not False  # llama.cpp's switch
        return attention if turned else replace(attention, rope=NO_ROPE)

    def _scaled(self, source: ConfigSource, attention: Attention) -> Attention:
        return replace(attention, scale=source.number("attention_multiplier", default=attention.scale))

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        return mlp_of(source, bias=None)

    def scales(self, source: ConfigSource) -> Mapping[str, float]:
        return {
            "embedding_scale": source.number("embedding_multiplier"),
            "residual_scale": source.number("residual_multiplier"),
            "logit_scale": 1 / source.number("logits_scaling"),
        }


SHARED = dict.fromkeys(("gate", "up", "shared.gate", "shared.up"), "shared_mlp.input_linear.weight")


class GraniteHybrid(Mamba2Family, Granite):
    """Layers of Mamba-2 between some of attention, experts beside a shared MLP, or that MLP alone (IBM 2025)."""

    name, gguf = "granitemoehybrid", "granitehybrid"
    model_types = ("granitemoehybrid",)
    transformers = "GraniteMoeHybridForCausalLM"
    huggingface_parts: ClassVar = (
        HUGGINGFACE_PARTS
        | SHARED
        | dict.fromkeys(("down", "shared.down"), "shared_mlp.output_linear.weight")
        | {"router": "block_sparse_moe.router.layer.weight"}
        | {f"experts.{part}": f"block_sparse_moe.{{}}.{part}_proj.weight" for part in MLP}
        | mamba2_parts("mamba")
    )
    gguf_keys: ClassVar = {
        **Granite.gguf_keys,
        **GGUF_EXPERT_KEYS,
        **MAMBA2_GGUF_KEYS,
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    }
    gguf_defaults: ClassVar = {**Granite.gguf_defaults, "mamba_conv_bias": True}
    gguf_parts: ClassVar = GGUF_PARTS | GGUF_EXPERT_PARTS | GGUF_SHARED_PARTS | MAMBA2_GGUF

    def describe(self, source: ConfigSource) -> ModelConfig:
        kinds = hybrid_kinds(source, source.get("layer_types") or source.get("layers_block_type"))
        attention = self._scaled(source, attention_of(source, kv_heads=kv_heads(source)))
        position = source.get("position_embedding_type")
        if position not in (None, "rope", "nope"):
            raise source.unsupported(f"position_embedding_type {position!r}")
        turned = source.get("rope.scaling.finetuned") is not False if source.format == "gguf" else position == "rope"
        attention = attention if turned else replace(attention, rope=NO_ROPE)
        mamba = None if set(kinds) == {FULL} else mamba2_of(source)
        mixers = (attention if kind == FULL or mamba is None else mamba for kind in kinds)
        layers = [Layer(mixer, self.feed_forward(source, i)) for i, mixer in enumerate(mixers)]
        return model_of(source, self, layers, **self.scales(source))

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        key = "num_experts" if source.format == "gguf" else "num_local_experts"
        if not source.get(key):
            size = "intermediate_size" if source.format == "gguf" else "shared_intermediate_size"
            return GatedMLP(source.integer(size), activation_of(source, "hidden_act", "silu"))
        experts = experts_of(source, "intermediate_size", normalized=True)
        return replace(experts, shared_size=source.integer("shared_intermediate_size"), shared_gated=False)
