"""OLMo 3 in Hugging Face form: OLMo 2 with windows in three of four layers (OLMo Team 2025, arXiv:2512.13961)."""

from twostroke.models.config import ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.olmo2 import Olmo2
from twostroke.models.families.windows import windows_by_type


class Olmo3(Olmo2):
    name, gguf = "olmo3", None
    model_types = ("olmo3",)
    transformers = "Olmo3ForCausalLM"

    def describe(self, source: ConfigSource) -> ModelConfig:
        return self.of(source, windows_by_type(source, lambda i: (i + 1) % 4 != 0), "full_attention")
