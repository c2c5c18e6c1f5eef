"""Granite: factors of embeddings, of attention, of what layers add, and of logits (IBM 2024, after muP)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import attention_of, mlp_of, model_of
from twostroke.models.families.llama import Llama
from twostroke.models.rope import NO_ROPE


class Granite(Llama):
    name = gguf = "granite"
    model_types: ClassVar[tuple[str, ...]] = ("granite",)
    transformers = "GraniteForCausalLM"
    gguf_keys: ClassVar = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    gguf_defaults: ClassVar = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}

    def describe(self, source: ConfigSource) -> ModelConfig:
        attention = attention_of(source)
        attention = replace(attention, scale=source.number("attention_multiplier", default=attention.scale))
        if source.format == "gguf" and source.get("rope.scaling.finetuned") is False:  # llama.cpp's switch of RoPE
            attention = replace(attention, rope=NO_ROPE)
        mlp = mlp_of(source, bias=source.biases >= {"gate", "up", "down"})
        return self.scaled(source, [Layer(attention, mlp)] * source.num_layers)

    def scaled(self, source: ConfigSource, layers: Sequence[Layer]) -> ModelConfig:
        """The model of these layers, with Granite's factors."""
        return model_of(
            source,
            self,
            layers,
            embedding_scale=source.number("embedding_multiplier"),
            residual_scale=source.number("residual_multiplier"),
            logit_scale=1 / source.number("logits_scaling"),
        )
