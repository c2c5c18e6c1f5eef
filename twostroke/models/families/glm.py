"""GLM-4 9B in Hugging Face form (Zeng et al. 2024, arXiv:2406.12793); GGUF files of it say `chatglm`."""

from twostroke.models.families.glm4 import FUSED_GGUF, FUSED_HUGGINGFACE, Glm4


class Glm(Glm4):
    name, gguf = "glm", "chatglm"
    model_types = ("glm",)
    transformers = "GlmForCausalLM"
    gguf_parts = FUSED_GGUF
    huggingface_parts = FUSED_HUGGINGFACE
    post_norms = False
