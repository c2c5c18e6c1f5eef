"""Qwen3.5 with a mixture of experts in every layer, and one that all tokens pass (Qwen Team 2026)."""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Experts, GatedMLP
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import experts_of
from twostroke.models.families.qwen2_moe import Qwen2MoE
from twostroke.models.families.qwen3_5 import Qwen3_5

EXPERT_PARTS = ("router", "experts.", "shared")  # the beginnings of names that are those of Qwen2-MoE


class Qwen3_5MoE(Qwen3_5):  # the version is part of the name
    name, gguf = "qwen3_5_moe", "qwen35moe"
    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    transformers = "Qwen3_5MoeForCausalLM"
    gguf_keys: ClassVar = {**Qwen3_5.gguf_keys, **Qwen2MoE.gguf_keys}
    huggingface_parts: ClassVar = {
        **Qwen3_5.huggingface_parts,
        **{ours: theirs for ours, theirs in Qwen2MoE.huggingface_parts.items() if ours.startswith(EXPERT_PARTS)},
    }
    gguf_parts: ClassVar = {
        **Qwen3_5.gguf_parts,
        **{ours: theirs for ours, theirs in Qwen2MoE.gguf_parts.items() if ours.startswith(EXPERT_PARTS)},
    }

    def feed_forward(self, source: ConfigSource) -> GatedMLP | Experts:
        made = experts_of(source, "moe_intermediate_size", normalized=True)
        return replace(made, shared_size=source.integer("shared_expert_intermediate_size"))
