"""OLMo 2: norms only behind attention and MLP, and over all heads of Q and of K (OLMo Team 2024, arXiv:2501.00656).

GGUF files of OLMo 3 say `olmo2` too: they have windows, and their sliding layers have no scaling of RoPE.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_PARTS,
    HUGGINGFACE_PARTS,
    POST_NORMS_GGUF,
    Family,
    attention_of,
    mlp_of,
    model_of,
)
from twostroke.models.families.windows import windows_by_pattern, windows_by_type


class Olmo2(Family):
    name = "olmo2"
    gguf: ClassVar[str | None] = "olmo2"
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    transformers = "Olmo2ForCausalLM"
    gguf_defaults: ClassVar = {"sliding_window_pattern": 4}
    gguf_parts = GGUF_PARTS | POST_NORMS_GGUF
    huggingface_parts = HUGGINGFACE_PARTS | {
        "attn_post_norm": "post_attention_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    }

    def describe(self, source: ConfigSource) -> ModelConfig:
        slides = source.format == "gguf" and source.get("sliding_window")
        if not slides:
            return self.of(source, [None] * source.num_layers, None)
        return self.of(source, windows_by_pattern(source), "full_attention")

    def of(self, source: ConfigSource, windows: Sequence[int | None], kind: str | None) -> ModelConfig:
        """The model whose layers have these windows; those without one are of a kind."""
        whole = attention_of(source, kind, qk_norm=True, whole_norm=True)
        local = whole
        if any(windows):
            local = replace(whole, rope=source.rope(whole.head_dim, "sliding_attention"))
        mlp = mlp_of(source)
        layers = [
            Layer(replace(whole if window is None else local, window=window), mlp, post_norms=True, pre_norms=False)
            for window in windows
        ]
        return model_of(source, self, layers)


class Olmo3(Olmo2):
    """OLMo 3 in Hugging Face form: windows in three of four layers (OLMo Team 2025, arXiv:2512.13961)."""

    name, gguf = "olmo3", None
    model_types = ("olmo3",)
    transformers = "Olmo3ForCausalLM"

    def describe(self, source: ConfigSource) -> ModelConfig:
        return self.of(source, windows_by_type(source, lambda i: (i + 1) % 4 != 0), "full_attention")
