"""Granite 4: layers of Mamba-2 between some of attention, experts beside a shared MLP, or that MLP alone (IBM 2025).

GGUF files of models without Mamba layers say `granite`.
"""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    HUGGINGFACE_PARTS,
    activation_of,
    attention_of,
    experts_of,
)
from twostroke.models.families.granite import Granite
from twostroke.models.families.hybrid_layers import FULL, hybrid_kinds, kv_heads
from twostroke.models.families.mamba2 import MAMBA2_GGUF, MAMBA2_GGUF_KEYS, Mamba2Family, mamba2_of, mamba2_parts
from twostroke.models.rope import NO_ROPE

SHARED = dict.fromkeys(("gate", "up", "shared.gate", "shared.up"), "shared_mlp.input_linear.weight")


class GraniteHybrid(Mamba2Family, Granite):
    name, gguf = "granitemoehybrid", "granitehybrid"
    model_types = ("granitemoehybrid",)
    transformers = "GraniteMoeHybridForCausalLM"
    huggingface_parts: ClassVar = (
        HUGGINGFACE_PARTS
        | SHARED
        | dict.fromkeys(("down", "shared.down"), "shared_mlp.output_linear.weight")
        | {"router": "block_sparse_moe.router.layer.weight"}
        | {f"experts.{part}": f"block_sparse_moe.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}
        | mamba2_parts("mamba")
    )
    gguf_keys: ClassVar = {
        **Granite.gguf_keys,
        **GGUF_EXPERT_KEYS,
        **MAMBA2_GGUF_KEYS,
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    }
    gguf_defaults: ClassVar = {**Granite.gguf_defaults, "mamba_conv_bias": True}
    gguf_parts: ClassVar = (
        GGUF_PARTS
        | GGUF_EXPERT_PARTS
        | {f"shared.{part}": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")}
        | MAMBA2_GGUF
    )

    def describe(self, source: ConfigSource) -> ModelConfig:
        kinds = hybrid_kinds(source, source.get("layer_types") or source.get("layers_block_type"))
        attention = attention_of(source, kv_heads=kv_heads(source))
        attention = replace(attention, scale=source.number("attention_multiplier", default=attention.scale))
        position = source.get("position_embedding_type")
        if position not in (None, "rope", "nope"):
            raise source.unsupported(f"position_embedding_type {position!r}")
        turned = source.get("rope.scaling.finetuned") is not False if source.format == "gguf" else position == "rope"
        attention = attention if turned else replace(attention, rope=NO_ROPE)
        mamba = None if set(kinds) == {FULL} else mamba2_of(source)
        layers = [Layer(attention if kind == FULL or mamba is None else mamba, self._mlp(source)) for kind in kinds]
        return self.scaled(source, layers)

    def _mlp(self, source: ConfigSource) -> GatedMLP | Experts:
        key = "num_experts" if source.format == "gguf" else "num_local_experts"
        if not source.get(key):
            size = "intermediate_size" if source.format == "gguf" else "shared_intermediate_size"
            return GatedMLP(source.integer(size), activation_of(source, "hidden_act", "silu"))
        experts = experts_of(source, "intermediate_size", normalized=True)
        return replace(experts, shared_size=source.integer("shared_intermediate_size"), shared_gated=False)
