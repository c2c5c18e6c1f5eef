"""Phi-3 and Phi-4-mini: one matrix for Q, K and V, one for gate and up (Abdin et al. 2024, arXiv:2404.14219)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from twostroke.models.config import ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import FUSED_MLP_GGUF, FUSED_MLP_HUGGINGFACE, Family, Transform
from twostroke.models.families.head_layouts import to_our_layout
from twostroke.models.families.windows import one_window


class Phi3(Family):
    name = gguf = "phi3"
    model_types = ("phi3",)
    transformers = "Phi3ForCausalLM"
    partial_rope = True
    gguf_parts = FUSED_MLP_GGUF | dict.fromkeys("qkv", "attn_qkv.weight")
    huggingface_parts: ClassVar = FUSED_MLP_HUGGINGFACE | dict.fromkeys("qkv", "self_attn.qkv_proj.weight")
    switches: ClassVar = {"bias": False, "output_bias": False}

    def describe(self, source: ConfigSource) -> ModelConfig:
        scaling: Any = source.get("rope_scaling")
        if isinstance(scaling, dict) and scaling.get("type") == "yarn":  # transformers reads it as LongRoPE
            raise source.unsupported("RoPE scaling 'yarn'")
        return super().describe(source)

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        longest = source.integer("max_position_embeddings")  # Phi-4-mini: no entry leaves its window
        return [None if window is None or window >= longest else window for window in one_window(source)]

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        return to_our_layout(config, "halves")
