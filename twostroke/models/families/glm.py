"""GLM-4 9B in Hugging Face form (Zeng et al. 2024, arXiv:2406.12793); GGUF files of it say `chatglm`."""

from twostroke.models.families.family import FUSED_MLP_GGUF, FUSED_MLP_HUGGINGFACE
from twostroke.models.families.glm4 import Glm4


class Glm(Glm4):
    name, gguf = "glm", "chatglm"
    model_types = ("glm",)
    transformers = "GlmForCausalLM"
    gguf_parts = FUSED_MLP_GGUF
    huggingface_parts = FUSED_MLP_HUGGINGFACE
    post_norms = False
