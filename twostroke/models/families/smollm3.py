"""SmolLM3: every fourth layer, or those that config.json names, has no RoPE (Bakouch et al. 2025)."""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import attention_of, mlp_of, model_of
from twostroke.models.families.llama import Llama
from twostroke.models.rope import NO_ROPE


class SmolLM3(Llama):
    name = gguf = "smollm3"
    model_types = ("smollm3",)
    transformers = "SmolLM3ForCausalLM"
    gguf_keys: ClassVar = {}  # no experts
    gguf_defaults: ClassVar = {"no_rope_layer_interval": 4}  # llama.cpp knows no other

    def describe(self, source: ConfigSource) -> ModelConfig:
        if source.get("use_sliding_window"):
            raise source.unsupported("use_sliding_window")
        attention = attention_of(source)
        mlp = mlp_of(source, bias=source.biases >= {"gate", "up", "down"})
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
