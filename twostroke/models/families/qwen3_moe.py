"""Qwen3 with a mixture of experts instead of the MLP (Yang et al. 2025, arXiv:2505.09388)."""

from typing import ClassVar

from twostroke.models.config import Experts, GatedMLP
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    HUGGINGFACE_PARTS,
    experts_of,
    mlp_of,
)
from twostroke.models.families.qwen2 import uses_windows
from twostroke.models.families.qwen3 import Qwen3


class Qwen3MoE(Qwen3):
    name = gguf = "qwen3moe"
    model_types = ("qwen3_moe",)
    transformers = "Qwen3MoeForCausalLM"
    gguf_keys = GGUF_EXPERT_KEYS
    gguf_defaults: ClassVar = {"norm_topk_prob": True, "decoder_sparse_step": 1}
    gguf_parts = GGUF_PARTS | GGUF_EXPERT_PARTS
    huggingface_parts = HUGGINGFACE_PARTS | {
        "router": "mlp.gate.weight",
        "experts.gate": "mlp.experts.{}.gate_proj.weight",
        "experts.up": "mlp.experts.{}.up_proj.weight",
        "experts.down": "mlp.experts.{}.down_proj.weight",
    }

    def windows(self, source: ConfigSource) -> tuple[int | None, ...]:
        """A window in every layer if config.json enables windows: transformers looks at no other key here."""
        window = source.integer("sliding_window") if uses_windows(source) else None
        return (window,) * source.num_layers

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        """Experts in every `decoder_sparse_step`-th layer, except `mlp_only_layers`; an MLP in the others."""
        dense = source.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(n) is int and 0 <= n < source.num_layers for n in dense):
            raise source.wrong("mlp_only_layers", f"a list of layers, from 0 to {source.num_layers - 1}")
        if layer in dense or (layer + 1) % source.integer("decoder_sparse_step"):
            return mlp_of(source)
        normalized = source.get("norm_topk_prob")
        if not isinstance(normalized, bool):
            raise source.wrong("norm_topk_prob", "true or false")
        return experts_of(source, "moe_intermediate_size", normalized)
