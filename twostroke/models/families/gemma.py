"""Gemma 2 and 3 (text): windows in some layers, and four norms in each."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_PARTS,
    HUGGINGFACE_PARTS,
    POST_NORMS_GGUF,
    Family,
    Transform,
    activation_of,
    attention_of,
    model_of,
)
from twostroke.models.families.windows import windows_by_pattern
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import tensor_shapes

PATTERN = 6  # five sliding layers, then a global one
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


class Gemma3(Family):
    """Sliding and global layers have different RoPEs (Gemma Team 2025, arXiv:2503.19786)."""

    name = gguf = "gemma3"
    model_types = ("gemma3_text", "gemma3")  # "gemma3" has vision; its config contains the text model's
    transformers = "Gemma3ForCausalLM"
    gguf_defaults: ClassVar = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": PATTERN}
    gguf_parts = GGUF_PARTS | POST_NORMS_GGUF
    # Gemma also has a norm after attention, so the norm before the MLP has another name than in other families.
    huggingface_parts = HUGGINGFACE_PARTS | {
        "attn_post_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    }

    layers_of_27b: ClassVar[int] = 62

    def describe(self, source: ConfigSource) -> ModelConfig:
        sliding = attention_of(source, "sliding_attention", qk_norm=True)
        return self.of(source, sliding, attention_of(source, "full_attention", qk_norm=True))

    def of(self, source: ConfigSource, sliding: Attention, whole: Attention, **caps: float | None) -> ModelConfig:
        """The model of these two kinds of layers."""
        hidden, scale = source.integer("hidden_size"), whole.scale
        if source.format == "huggingface":
            scale = source.number("query_pre_attn_scalar") ** -0.5
        elif source.num_layers == self.layers_of_27b:  # whose scale its GGUF file does not tell
            scale = (hidden / whole.num_heads) ** -0.5
        mlp = GatedMLP(source.integer("intermediate_size"), activation_of(source, "hidden_activation", "gelu_tanh"))
        both = self.both_ways(source)
        layers = [
            Layer(
                replace(
                    whole if window is None else sliding,
                    scale=scale,
                    window=window // 2 + 1 if both and window is not None else window,  # of which half is on each side
                    both_ways=both,
                ),
                mlp,
                post_norms=True,
            )
            for window in windows_by_pattern(source)
        ]
        return model_of(source, self, layers, embedding_scale=hidden**0.5, **caps)

    def both_ways(self, source: ConfigSource) -> bool:
        """Whether attention is in both directions (EmbeddingGemma; Vera et al. 2025, arXiv:2509.20354)."""
        return bool(source.get("use_bidirectional_attention"))

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Add 1 to the norms of Hugging Face files, which store w - 1."""
        if format != "huggingface":
            return {}
        return dict.fromkeys((name for name in tensor_shapes(config) if name.endswith("norm")), plus_one)


class GemmaEmbedding(Gemma3):
    """EmbeddingGemma in GGUF files; its config.json is one of Gemma 3."""

    name = gguf = "gemma-embedding"
    model_types = ()

    def both_ways(self, source: ConfigSource) -> bool:
        """Always."""
        return True


class Gemma2(Gemma3):
    """Scores of attention and logits are capped (Gemma Team 2024, arXiv:2408.00118)."""

    name = gguf = "gemma2"
    model_types = ("gemma2",)
    transformers = "Gemma2ForCausalLM"
    gguf_defaults: ClassVar = {**CAPS, "sliding_window_pattern": 2}
    layers_of_27b = 46

    def both_ways(self, source: ConfigSource) -> bool:
        """Never: no file of it says so."""
        if super().both_ways(source):
            raise source.unsupported("use_bidirectional_attention")
        return False

    def describe(self, source: ConfigSource) -> ModelConfig:
        score_cap, logit_cap = (None if source.get(key) is None else source.number(key) for key in CAPS)
        attention = attention_of(source)
        return self.of(source, attention, attention, score_cap=score_cap, logit_cap=logit_cap)


def plus_one(tensor: RawTensor) -> RawTensor:
    """1 + w in float32, the precision in which the model computes it."""
    return tensor.with_floats(tensor.dequantize() + np.float32(1))
