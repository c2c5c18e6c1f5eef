"""gpt-oss: sink logits, windows in every other layer, experts with biases and a clamped SwiGLU (arXiv:2508.10925)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Experts, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    HUGGINGFACE_EXPERT_PARTS,
    HUGGINGFACE_PARTS,
    MLP,
    Family,
    experts_of,
)
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
        **{f"experts.{part}_bias": f"ffn_{part}_exps.bias" for part in MLP},
    }
    huggingface_parts: ClassVar = {
        **HUGGINGFACE_PARTS,
        **HUGGINGFACE_EXPERT_PARTS,
        "sink_logits": "self_attn.sinks",
        "router": "mlp.router.weight",
        "router_bias": "mlp.router.bias",
        **{f"experts.{part}_bias": f"mlp.experts.{{}}.{part}_proj.bias" for part in MLP},
    }

    switches: ClassVar = {"sink_logits": True}

    def describe(self, source: ConfigSource) -> ModelConfig:
        for key, usual in SWIGLU.items():
            if source.format == "huggingface" and source.number(key) != usual:
                raise source.unsupported(f"{key} {source.get(key)}")
        return super().describe(source)

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        return windows_by_pattern(source)

    def feed_forward(self, source: ConfigSource, layer: int) -> Experts:
        found = experts_of(source, "intermediate_size", normalized=True)
        return replace(found, activation="swiglu_oai", bias=True)
