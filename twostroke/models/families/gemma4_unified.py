"""Gemma 4 12B (text): the layers of Gemma 4, in files whose images and sounds go straight to the model."""

from twostroke.models.families.gemma4 import Gemma4


class Gemma4Unified(Gemma4):
    name = "gemma4_unified"
    gguf = None  # its files are those of `Gemma4`
    model_types = ("gemma4_unified_text", "gemma4_unified")
    transformers = "Gemma4UnifiedForCausalLM"
