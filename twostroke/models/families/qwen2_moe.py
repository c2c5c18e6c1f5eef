"""Qwen2 with experts, and one that all tokens pass (Yang et al. 2024, arXiv:2407.10671); also Qwen1.5-MoE."""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Experts, GatedMLP, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.qwen2 import Qwen2
from twostroke.models.families.qwen3_moe import Qwen3MoE


class Qwen2MoE(Qwen3MoE):
    name = gguf = "qwen2moe"
    model_types = ("qwen2_moe",)
    transformers = "Qwen2MoeForCausalLM"
    switches = Qwen2.switches
    gguf_keys: ClassVar = {**Qwen3MoE.gguf_keys, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
    gguf_defaults: ClassVar = {"norm_topk_prob": False, "decoder_sparse_step": 1}
    gguf_parts: ClassVar = {
        **Qwen3MoE.gguf_parts,
        "shared_gate": "ffn_gate_inp_shexp.weight",
        "shared.gate": "ffn_gate_shexp.weight",
        "shared.up": "ffn_up_shexp.weight",
        "shared.down": "ffn_down_shexp.weight",
    }
    huggingface_parts: ClassVar = {
        **Qwen3MoE.huggingface_parts,
        "shared_gate": "mlp.shared_expert_gate.weight",
        "shared.gate": "mlp.shared_expert.gate_proj.weight",
        "shared.up": "mlp.shared_expert.up_proj.weight",
        "shared.down": "mlp.shared_expert.down_proj.weight",
    }

    def describe(self, source: ConfigSource) -> ModelConfig:
        for key, usual in (("use_sliding_window", False), ("qkv_bias", True)):
            if source.format == "huggingface" and source.get(key) not in (None, usual):
                raise source.unsupported(f"{key} {source.get(key)}")
        return super().describe(source)

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        made = super().feed_forward(source, layer)
        if isinstance(made, GatedMLP):
            return made
        return replace(made, shared_size=source.integer("shared_expert_intermediate_size"))
