"""Qwen3: a norm over each head of Q and K, and no biases (Yang et al. 2025, arXiv:2505.09388)."""

from typing import ClassVar

from twostroke.models.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    name = gguf = "qwen3"
    model_types = ("qwen3",)
    transformers = "Qwen3ForCausalLM"
    switches: ClassVar = {"qk_norm": True}
