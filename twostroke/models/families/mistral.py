"""Mistral and Mixtral in Hugging Face form (GGUF files of them say `llama`), and Ministral 3."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from twostroke.models.config import Attention, Experts, GatedMLP, ModelConfig, QueryGrowth
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import HUGGINGFACE_PARTS, Family, Transform, experts_of
from twostroke.models.families.head_layouts import to_our_layout
from twostroke.models.families.windows import one_window


class Mistral(Family):
    """Jiang et al. 2023, arXiv:2310.06825."""

    name: ClassVar[str] = "mistral"
    gguf: ClassVar[str | None] = None
    model_types: ClassVar[tuple[str, ...]] = ("mistral", "mistral3")  # "mistral3" has vision and contains a text model
    transformers = "MistralForCausalLM"
    switches: ClassVar = {"bias": False, "output_bias": False}

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        if source.get("layer_types") is not None:
            raise source.unsupported("layer_types")
        return one_window(source)


class Mixtral(Mistral):
    """Jiang et al. 2024, arXiv:2401.04088."""

    name = "mixtral"
    model_types = ("mixtral",)
    transformers = "MixtralForCausalLM"
    huggingface_parts = HUGGINGFACE_PARTS | {
        "router": "block_sparse_moe.gate.weight",
        "experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "experts.down": "block_sparse_moe.experts.{}.w2.weight",
    }

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        return one_window(source)

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        return experts_of(source, "intermediate_size", normalized=True)


class Ministral3(Mistral):
    """Queries grow with their position, beyond the context before YaRN (Mistral AI 2025)."""

    name, gguf = "ministral3", "mistral3"
    model_types = ("ministral3",)
    transformers = "Ministral3ForCausalLM"
    gguf_keys: ClassVar = {
        "llama_4_scaling_beta": "attention.temperature_scale",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
    }

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        return one_window(source)

    def attention(self, source: ConfigSource, window: int | None) -> Attention:
        return replace(super().attention(source, window), growth=_growth(source))

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Undo the interleaving of GGUF files, as Llama's."""
        return to_our_layout(config, "pairs" if format == "gguf" else "halves")


def _growth(source: ConfigSource) -> QueryGrowth | None:
    """How queries grow, if the checkpoint says so; among the parameters of RoPE in config.json."""
    stated: Any = source.get("rope_parameters") if source.format == "huggingface" else None

    def get(key: str) -> Any:
        return stated.get(key) if isinstance(stated, dict) else source.get(key)

    beta, length = "llama_4_scaling_beta", "original_max_position_embeddings"
    if not get(beta):
        return None
    return QueryGrowth(source.checked(beta, get(beta)), round(source.checked(length, get(length))))
