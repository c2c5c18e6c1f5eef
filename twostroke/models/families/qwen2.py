"""Qwen2 and Qwen2.5: Q, K and V have biases (Yang et al. 2024, arXiv:2407.10671)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from twostroke.models.config import Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import Family, attention_of, mlp_of, model_of
from twostroke.models.families.windows import windows_by_type


class Qwen2(Family):
    name = gguf = "qwen2"
    model_types = ("qwen2",)
    transformers = "Qwen2ForCausalLM"
    switches: ClassVar[Mapping[str, Any]] = {"bias": True, "output_bias": False}

    def describe(self, source: ConfigSource) -> ModelConfig:
        layers = [
            Layer(attention_of(source, window=window, **self.switches), self.feed_forward(source, i))
            for i, window in enumerate(self.windows(source))
        ]
        return model_of(source, self, layers)

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        return mlp_of(source)

    def windows(self, source: ConfigSource) -> tuple[int | None, ...]:
        """Each layer's window, if config.json enables windows: by `layer_types`, or from `max_window_layers` on."""
        if not uses_windows(source):
            return (None,) * source.num_layers
        full_layers = source.get("max_window_layers")  # 0 is valid, which `integer` rejects
        if source.get("layer_types") is None and type(full_layers) is not int:
            raise source.wrong("max_window_layers", "an integer")
        return windows_by_type(source, lambda i: i >= full_layers)


def uses_windows(source: ConfigSource) -> bool:
    """Whether config.json enables windows. GGUF files of these families have none."""
    return (
        source.format == "huggingface"
        and bool(source.get("use_sliding_window"))
        and source.get("sliding_window") is not None
    )
