"""Mistral in Hugging Face form (Jiang et al. 2023, arXiv:2310.06825); GGUF files of it say `llama`."""

from twostroke.models.config import Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import Family, attention_of, mlp_of, model_of


class Mistral(Family):
    name, gguf = "mistral", None
    model_types = ("mistral", "mistral3")  # "mistral3" has vision; its config contains the text model's
    transformers = "MistralForCausalLM"

    def describe(self, source: ConfigSource) -> ModelConfig:
        if source.get("layer_types") is not None:
            raise source.unsupported("layer_types")
        window = None if source.get("sliding_window") is None else source.integer("sliding_window")
        layer = Layer(attention_of(source, window=window, bias=False, output_bias=False), mlp_of(source))
        return model_of(source, self, [layer] * source.num_layers)
