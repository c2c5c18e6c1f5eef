"""Granite 4 without Mamba layers and experts, such as "micro", in Hugging Face form; its GGUF files say `granite`."""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import GatedMLP, Layer, ModelConfig
from twostroke.models.families.family import HUGGINGFACE_PARTS, ConfigSource, activation_of, attention_of
from twostroke.models.families.granite import Granite
from twostroke.models.rope import NO_ROPE


class GraniteHybrid(Granite):
    name, gguf = "granitemoehybrid", None
    model_types = ("granitemoehybrid",)
    transformers = "GraniteMoeHybridForCausalLM"
    defaults: ClassVar = {**Granite.defaults, "num_local_experts": 8, "shared_intermediate_size": 1024}
    huggingface_parts: ClassVar = (
        HUGGINGFACE_PARTS
        | dict.fromkeys(("gate", "up"), "shared_mlp.input_linear.weight")
        | {"down": "shared_mlp.output_linear.weight"}
    )

    def describe(self, source: ConfigSource) -> ModelConfig:
        if source.get("num_local_experts"):
            raise source.unsupported("experts")
        kinds = source.get("layer_types") or source.get("layers_block_type")
        if not isinstance(kinds, list) or not set(kinds) <= {"attention", "full_attention"}:
            raise source.unsupported("layers other than attention")
        attention = replace(attention_of(source), scale=source.number("attention_multiplier"))
        position = source.get("position_embedding_type")
        if position not in (None, "rope", "nope"):
            raise source.unsupported(f"position_embedding_type {position!r}")
        if position != "rope":
            attention = replace(attention, rope=NO_ROPE)
        size = source.integer("shared_intermediate_size")
        return self.scaled(source, Layer(attention, GatedMLP(size, activation_of(source, "hidden_act", "silu"))))
