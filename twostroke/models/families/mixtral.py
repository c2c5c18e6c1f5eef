"""Mixtral in Hugging Face form (Jiang et al. 2024, arXiv:2401.04088); GGUF files of it say `llama`."""

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import HUGGINGFACE_PARTS, Family, attention_of, experts_of, model_of


class Mixtral(Family):
    name, gguf = "mixtral", None
    model_types = ("mixtral",)
    transformers = "MixtralForCausalLM"
    huggingface_parts = HUGGINGFACE_PARTS | {
        "router": "block_sparse_moe.gate.weight",
        "experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "experts.down": "block_sparse_moe.experts.{}.w2.weight",
    }

    def describe(self, source: ConfigSource) -> ModelConfig:
        window = source.integer("sliding_window") if source.get("sliding_window") else None
        attention = attention_of(source, window=window, bias=False, output_bias=False)
        layer = Layer(attention, experts_of(source, "intermediate_size", normalized=True))
        return model_of(source, self, [layer] * source.num_layers)
