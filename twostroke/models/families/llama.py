"""Llama, with Llama 3's scaled RoPE (Touvron et al. 2023), and SmolLM3. GGUF files of Mistral, too, say `llama`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Experts, GatedMLP, Layer, ModelConfig
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
from twostroke.models.families.windows import one_window
from twostroke.models.rope import NO_ROPE


class Llama(Family):
    name = gguf = "llama"
    model_types = ("llama",)
    transformers = "LlamaForCausalLM"
    gguf_keys = GGUF_EXPERT_KEYS
    gguf_parts = GGUF_PARTS | GGUF_EXPERT_PARTS

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        """Only GGUF files of Mistral 7B v0.1 have a window: Hugging Face's Llama has none."""
        return one_window(source) if source.format == "gguf" else super().windows(source)

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        if source.format == "gguf" and source.get("num_experts"):
            return experts_of(source, "intermediate_size", normalized=True)
        return mlp_of(source, bias=None)

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Undo the interleaving of GGUF files, where rows i and i + half of each head of Q and K are adjacent."""
        return to_our_layout(config, "pairs" if format == "gguf" else "halves")


class SmolLM3(Llama):
    """Every fourth layer, or those that config.json names, has no RoPE (Bakouch et al. 2025)."""

    name = gguf = "smollm3"
    model_types = ("smollm3",)
    transformers = "SmolLM3ForCausalLM"
    gguf_keys: ClassVar = {}  # no experts
    gguf_defaults: ClassVar = {"no_rope_layer_interval": 4}  # llama.cpp knows no other

    def describe(self, source: ConfigSource) -> ModelConfig:
        if source.get("use_sliding_window"):
            raise source.unsupported("use_sliding_window")
        attention, mlp = attention_of(source), mlp_of(source, bias=None)
        layers = [Layer(attention if turns else replace(attention, rope=NO_ROPE), mlp) for turns in _rotated(source)]
        return model_of(source, self, layers)


def _rotated(source: ConfigSource) -> list[bool]:
    """Whether each layer has RoPE: as `no_rope_layers` says, whose 1 means that it has."""
    stated, count = source.get("no_rope_layers"), source.num_layers
    if stated is None:
        step = source.integer("no_rope_layer_interval")
        return [(i + 1) % step != 0 for i in range(count)]
    if not isinstance(stated, list) or len(stated) < count or not all(one in (0, 1) for one in stated):
        raise source.wrong("no_rope_layers", f"a list of {count} numbers 0 and 1")
    return [bool(one) for one in stated[:count]]
