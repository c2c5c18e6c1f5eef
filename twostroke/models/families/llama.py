"""Llama, with Llama 3's scaled RoPE (Touvron et al. 2023); also Mistral and Mixtral in GGUF files."""

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    Family,
    Transform,
    attention_of,
    experts_of,
    mlp_of,
    model_of,
)
from twostroke.models.families.head_layouts import to_our_layout


class Llama(Family):
    name = gguf = "llama"
    model_types = ("llama",)
    transformers = "LlamaForCausalLM"
    gguf_keys = GGUF_EXPERT_KEYS
    gguf_parts = GGUF_PARTS | GGUF_EXPERT_PARTS

    def describe(self, source: ConfigSource) -> ModelConfig:
        # Only GGUF files of Mistral 7B v0.1 have a window: Hugging Face's Llama has none.
        slides = source.format == "gguf" and source.get("sliding_window")
        window = source.integer("sliding_window") if slides else None
        mixed = source.format == "gguf" and source.get("num_experts")
        mlp = (
            experts_of(source, "intermediate_size", normalized=True)
            if mixed
            else mlp_of(source, bias=source.biases >= {"gate", "up", "down"})
        )
        layer = Layer(attention_of(source, window=window), mlp)
        return model_of(source, self, [layer] * source.num_layers)

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Undo the interleaving of GGUF files, where rows i and i + half of each head of Q and K are adjacent."""
        return to_our_layout(config, "pairs" if format == "gguf" else "halves")
