"""GLM-4: half of each head is rotated, in pairs of neighbours (Zeng et al. 2024, arXiv:2406.12793)."""

from typing import ClassVar

from twostroke.models.config import ModelConfig
from twostroke.models.families.family import (
    FUSED_MLP_GGUF,
    FUSED_MLP_HUGGINGFACE,
    POST_NORMS_GGUF,
    Family,
    Transform,
)
from twostroke.models.families.head_layouts import to_our_layout


class Glm(Family):
    """GLM-4 9B in Hugging Face form; GGUF files of it say `chatglm`."""

    name: ClassVar[str] = "glm"
    gguf: ClassVar[str | None] = "chatglm"
    model_types: ClassVar[tuple[str, ...]] = ("glm",)
    transformers = "GlmForCausalLM"
    partial_rope = True
    gguf_parts = FUSED_MLP_GGUF
    huggingface_parts = FUSED_MLP_HUGGINGFACE
    switches: ClassVar = {"output_bias": False}

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        return to_our_layout(config, "pairs")


class Glm4(Glm):
    """GLM-4-0414: each layer has four norms."""

    name = gguf = "glm4"
    model_types = ("glm4",)
    transformers = "Glm4ForCausalLM"
    gguf_parts = FUSED_MLP_GGUF | POST_NORMS_GGUF
    huggingface_parts = FUSED_MLP_HUGGINGFACE | {
        "attn_post_norm": "post_self_attn_layernorm.weight",
        "mlp_post_norm": "post_mlp_layernorm.weight",
    }
    post_norms = True
