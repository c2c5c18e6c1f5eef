"""LFM2 with a mixture of experts behind its first layers (Liquid AI 2025, arXiv:2511.23404)."""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Experts, GatedMLP
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import GGUF_EXPERT_KEYS, GGUF_EXPERT_PARTS, experts_of
from twostroke.models.families.lfm2 import Lfm2

SIGMOID = 2  # in GGUF files


class Lfm2MoE(Lfm2):
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

    def feed_forward(self, source: ConfigSource, index: int) -> GatedMLP | Experts:
        dense = source.get("num_dense_layers")
        if type(dense) is not int or not 0 <= dense <= source.num_layers:
            raise source.wrong("num_dense_layers", f"from 0 to {source.num_layers}")
        if index < dense:
            return GatedMLP(source.integer("intermediate_size"))
        if source.get("routed_scaling_factor") != 1 or source.get("expert_gating_func") not in (None, SIGMOID):
            raise source.unsupported("factors of experts, or weights that are not sigmoids")
        found = experts_of(source, "moe_intermediate_size", bool(source.get("norm_topk_prob")))
        return replace(found, sigmoid=True, selection_bias=bool(source.get("use_expert_bias")))
