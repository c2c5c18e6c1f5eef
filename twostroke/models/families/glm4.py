"""GLM-4-0414: half of each head is rotated, in pairs of neighbours; each layer has four norms (Zeng et al. 2024)."""

from typing import ClassVar

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    FUSED_MLP_GGUF,
    FUSED_MLP_HUGGINGFACE,
    POST_NORMS_GGUF,
    Family,
    Transform,
    attention_of,
    mlp_of,
    model_of,
)
from twostroke.models.families.head_layouts import to_our_layout


class Glm4(Family):
    name = gguf = "glm4"
    model_types: ClassVar[tuple[str, ...]] = ("glm4",)
    transformers = "Glm4ForCausalLM"
    partial_rope = True
    gguf_parts = FUSED_MLP_GGUF | POST_NORMS_GGUF
    huggingface_parts = FUSED_MLP_HUGGINGFACE | {
        "attn_post_norm": "post_self_attn_layernorm.weight",
        "mlp_post_norm": "post_mlp_layernorm.weight",
    }
    post_norms: ClassVar[bool] = True

    def describe(self, source: ConfigSource) -> ModelConfig:
        layer = Layer(attention_of(source, output_bias=False), mlp_of(source), self.post_norms)
        return model_of(source, self, [layer] * source.num_layers)

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        return to_our_layout(config, "pairs")
