"""Gemma 2: scores of attention and logits are capped (Gemma Team 2024, arXiv:2408.00118)."""

from typing import ClassVar

from twostroke.models.config import ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import attention_of
from twostroke.models.families.gemma3 import Gemma3

CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


class Gemma2(Gemma3):
    name = gguf = "gemma2"
    model_types = ("gemma2",)
    transformers = "Gemma2ForCausalLM"
    gguf_defaults: ClassVar = {**CAPS, "sliding_window_pattern": 2}
    layers_of_27b = 46

    def both_ways(self, source: ConfigSource) -> bool:
        """Never: no file of it says so."""
        if super().both_ways(source):
            raise source.unsupported("use_bidirectional_attention")
        return False

    def describe(self, source: ConfigSource) -> ModelConfig:
        score_cap, logit_cap = (None if source.get(key) is None else source.number(key) for key in CAPS)
        attention = attention_of(source)
        return self.of(source, attention, attention, score_cap=score_cap, logit_cap=logit_cap)
