"""Qwen2, Qwen2.5 and Qwen3, each with an MLP or with experts; also Qwen1.5-MoE."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from twostroke.models.config import Experts, GatedMLP, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    GGUF_SHARED_PARTS,
    HUGGINGFACE_EXPERT_PARTS,
    HUGGINGFACE_PARTS,
    MLP,
    Family,
    experts_of,
    mlp_of,
)
from twostroke.models.families.windows import one_window, windows_by_type


class Qwen2(Family):
    """Q, K and V have biases (Yang et al. 2024, arXiv:2407.10671)."""

    name = gguf = "qwen2"
    model_types = ("qwen2",)
    transformers = "Qwen2ForCausalLM"
    switches: ClassVar[Mapping[str, Any]] = {"bias": True, "output_bias": False}

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        """Each layer's window, if config.json enables windows: by `layer_types`, or from `max_window_layers` on."""
        if not uses_windows(source):
            return super().windows(source)
        full_layers = source.get("max_window_layers")  # 0 is valid, which `integer` rejects
        if source.get("layer_types") is None and type(full_layers) is not int:
            raise source.wrong("max_window_layers", "an integer")
        return windows_by_type(source, lambda i: i >= full_layers)


class Qwen3(Qwen2):
    """A norm over each head of Q and K, and no biases (Yang et al. 2025, arXiv:2505.09388)."""

    name = gguf = "qwen3"
    model_types = ("qwen3",)
    transformers = "Qwen3ForCausalLM"
    switches: ClassVar = {"qk_norm": True}


class Qwen3MoE(Qwen3):
    """A mixture of experts instead of the MLP."""

    name = gguf = "qwen3moe"
    model_types = ("qwen3_moe",)
    transformers = "Qwen3MoeForCausalLM"
    gguf_keys = GGUF_EXPERT_KEYS
    gguf_defaults: ClassVar = {"norm_topk_prob": True, "decoder_sparse_step": 1}
    gguf_parts = GGUF_PARTS | GGUF_EXPERT_PARTS
    huggingface_parts = HUGGINGFACE_PARTS | HUGGINGFACE_EXPERT_PARTS

    def windows(self, source: ConfigSource) -> Sequence[int | None]:
        """A window in every layer if config.json enables windows: transformers looks at no other key here."""
        return one_window(source) if uses_windows(source) else (None,) * source.num_layers

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        """Experts in every `decoder_sparse_step`-th layer, except `mlp_only_layers`; an MLP in the others."""
        dense = source.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(n) is int and 0 <= n < source.num_layers for n in dense):
            raise source.wrong("mlp_only_layers", f"a list of layers, from 0 to {source.num_layers - 1}")
        if layer in dense or (layer + 1) % source.integer("decoder_sparse_step"):
            return mlp_of(source)
        normalized = source.get("norm_topk_prob")
        if not isinstance(normalized, bool):
            raise source.wrong("norm_topk_prob", "true or false")
        return experts_of(source, "moe_intermediate_size", normalized)


# Of experts that all tokens pass, and of their gate.
SHARED_KEYS = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
SHARED_GGUF = {"shared_gate": "ffn_gate_inp_shexp.weight"} | GGUF_SHARED_PARTS
SHARED_HUGGINGFACE = {"shared_gate": "mlp.shared_expert_gate.weight"} | {
    f"shared.{part}": f"mlp.shared_expert.{part}_proj.weight" for part in MLP
}


class Qwen2MoE(Qwen3MoE):
    """Qwen2 with experts, and one that all tokens pass."""

    name = gguf = "qwen2moe"
    model_types = ("qwen2_moe",)
    transformers = "Qwen2MoeForCausalLM"
    switches = Qwen2.switches
    gguf_keys: ClassVar = GGUF_EXPERT_KEYS | SHARED_KEYS
    gguf_defaults: ClassVar = {"norm_topk_prob": False, "decoder_sparse_step": 1}
    gguf_parts: ClassVar = {**Qwen3MoE.gguf_parts, **SHARED_GGUF}
    huggingface_parts: ClassVar = {**Qwen3MoE.huggingface_parts, **SHARED_HUGGINGFACE}

    def describe(self, source: ConfigSource) -> ModelConfig:
        for key, usual in (("use_sliding_window", False), ("qkv_bias", True)):
            if source.format == "huggingface" and source.get(key) not in (None, usual):
                raise source.unsupported(f"{key} {source.get(key)}")
        return super().describe(source)

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        made = super().feed_forward(source, layer)
        return made if isinstance(made, GatedMLP) else with_shared(source, made)


def with_shared(source: ConfigSource, experts: Experts) -> Experts:
    """Experts beside one that all tokens pass, with a gate."""
    return replace(experts, shared_size=source.integer("shared_expert_intermediate_size"))


def uses_windows(source: ConfigSource) -> bool:
    """Whether config.json enables windows. GGUF files of these families have none."""
    return (
        source.format == "huggingface"
        and bool(source.get("use_sliding_window"))
        and source.get("sliding_window") is not None
    )
