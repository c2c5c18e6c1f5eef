"""Llama, with Llama 3's scaled RoPE; also Mistral in GGUF files (Touvron et al. 2023; Jiang et al. 2023)."""

import numpy as np

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.family import DEFAULTS, ConfigSource, Family, Transform, attention_of, mlp_of, model_of
from twostroke.models.formats.tensor import RawTensor


class Llama(Family):
    name = gguf = "llama"
    model_types = ("llama",)
    transformers = "LlamaForCausalLM"
    defaults = DEFAULTS | {"intermediate_size": 11008, "max_position_embeddings": 2048}

    def describe(self, source: ConfigSource) -> ModelConfig:
        # Only GGUF files of Mistral 7B v0.1 have a window: Hugging Face's Llama has none.
        slides = source.format == "gguf" and source.get("sliding_window")
        window = source.integer("sliding_window") if slides else None
        mlp = mlp_of(source, bias=source.biases >= {"gate", "up", "down"})
        layer = Layer(attention_of(source, window=window), mlp)
        return model_of(source, self, [layer] * source.num_layers)

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Undo the interleaving of GGUF files, where rows i and i + half of each head of Q and K are adjacent."""
        if format != "gguf":
            return {}

        def split_halves(tensor: RawTensor) -> RawTensor:
            rows = np.arange(tensor.shape[0]).reshape(-1, config.head_dim // 2, 2)
            return tensor.permute_rows(rows.swapaxes(1, 2).reshape(-1))

        parts = ("q", "k", "q_bias", "k_bias") if config.layers[0].attention.bias else ("q", "k")
        return {f"layers.{i}.{part}": split_halves for i in range(config.num_layers) for part in parts}
