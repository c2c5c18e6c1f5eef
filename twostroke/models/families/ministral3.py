"""Ministral 3: queries grow with their position, beyond the context before YaRN (Mistral AI 2025)."""

from typing import Any, ClassVar

from twostroke.models.config import Layer, ModelConfig, QueryGrowth
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import attention_of, mlp_of, model_of
from twostroke.models.families.llama import Llama


class Ministral3(Llama):
    name, gguf = "ministral3", "mistral3"
    model_types = ("ministral3",)
    transformers = "Ministral3ForCausalLM"
    gguf_keys: ClassVar = {
        "llama_4_scaling_beta": "attention.temperature_scale",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
    }

    def describe(self, source: ConfigSource) -> ModelConfig:
        window = source.integer("sliding_window") if source.get("sliding_window") else None
        attention = attention_of(source, window=window, bias=False, output_bias=False, growth=_growth(source))
        return model_of(source, self, [Layer(attention, mlp_of(source))] * source.num_layers)


def _growth(source: ConfigSource) -> QueryGrowth | None:
    """How queries grow, if the checkpoint says so; among the parameters of RoPE in config.json."""
    stated: Any = source.get("rope_parameters") if source.format == "huggingface" else None

    def get(key: str) -> Any:
        return stated.get(key) if isinstance(stated, dict) else source.get(key)

    beta, length = "llama_4_scaling_beta", "original_max_position_embeddings"
    if not get(beta):
        return None
    return QueryGrowth(source.checked(beta, get(beta)), round(source.checked(length, get(length))))
