"""gpt-oss: sink logits, windows in every other layer, experts with biases and a clamped SwiGLU (arXiv:2508.10925)."""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    Family,
    attention_of,
    experts_of,
    model_of,
)
from twostroke.models.families.qwen3_moe import Qwen3MoE
from twostroke.models.families.windows import windows_by_pattern

# The constants of the activation, which no backend lets a checkpoint change.
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


class GptOss(Family):
    name, gguf = "gpt_oss", "gpt-oss"
    model_types = ("gpt_oss",)
    transformers = "GptOssForCausalLM"
    gguf_keys: ClassVar = {**GGUF_EXPERT_KEYS, "intermediate_size": "expert_feed_forward_length"}
    gguf_defaults: ClassVar = {"sliding_window_pattern": 2, "rope.scaling.truncate": False}
    gguf_parts: ClassVar = {
        **GGUF_PARTS,
        **GGUF_EXPERT_PARTS,
        "mlp_norm": "post_attention_norm.weight",
        "sink_logits": "attn_sinks.weight",
        "router_bias": "ffn_gate_inp.bias",
        **{f"experts.{part}_bias": f"ffn_{part}_exps.bias" for part in ("gate", "up", "down")},
    }
    huggingface_parts: ClassVar = {
        **Qwen3MoE.huggingface_parts,
        "sink_logits": "self_attn.sinks",
        "router": "mlp.router.weight",
        "router_bias": "mlp.router.bias",
        **{f"experts.{part}_bias": f"mlp.experts.{{}}.{part}_proj.bias" for part in ("gate", "up", "down")},
    }

    def describe(self, source: ConfigSource) -> ModelConfig:
        for key, usual in SWIGLU.items():
            if source.format == "huggingface" and source.number(key) != usual:
                raise source.unsupported(f"{key} {source.get(key)}")
        experts = replace(experts_of(source, "intermediate_size", normalized=True), activation="swiglu_oai", bias=True)
        layers = [
            Layer(attention_of(source, window=window, sink_logits=True), experts)
            for window in windows_by_pattern(source)
        ]
        return model_of(source, self, layers)
