"""Gemma 4 (text): heads of two sizes, norms of values, layers that share K and V, and numbers of tokens for each layer.

Gemma Team 2026. 26B-A4B has experts beside the MLP of each layer.
"""

from dataclasses import replace
from typing import Any, ClassVar

from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    MAX_HEAD_DIM,
    MLP,
    POST_NORMS_GGUF,
    Family,
    Transform,
    activation_of,
    model_of,
)
from twostroke.models.families.gemma import PATTERN, Gemma3
from twostroke.models.families.windows import windows_by_pattern
from twostroke.models.feed_forward import Activation
from twostroke.models.formats.tensor import RawTensor


class Gemma4(Family):
    name = gguf = "gemma4"
    model_types = ("gemma4_text", "gemma4")  # "gemma4" has vision and audio; its config contains the text model's
    transformers = "Gemma4ForCausalLM"
    gguf_keys: ClassVar = {
        "head_dim_swa": "attention.key_length_swa",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        **GGUF_EXPERT_KEYS,
        "top_k_experts": "expert_used_count",
    }
    gguf_defaults: ClassVar = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": PATTERN}
    gguf_outer: ClassVar = {
        "inputs.embed": "per_layer_token_embd.weight",
        "inputs.projection": "per_layer_model_proj.weight",
        "inputs.norm": "per_layer_proj_norm.weight",
    }
    gguf_parts: ClassVar = {
        **GGUF_PARTS,
        **POST_NORMS_GGUF,
        **GGUF_EXPERT_PARTS,
        **{f"shared.{part}": GGUF_PARTS[part] for part in MLP},
        "router_norm": "ffn_gate_inp.scale",
        "expert_factors": "ffn_down_exps.scale",
        "experts_norm": "pre_ffw_norm_2.weight",
        "shared_post_norm": "post_ffw_norm_1.weight",
        "experts_post_norm": "post_ffw_norm_2.weight",
        "scale": "layer_output_scale.weight",
        "input_gate": "inp_gate.weight",
        "input_projection": "proj.weight",
        "input_norm": "post_norm.weight",
    }
    huggingface_outer: ClassVar = {
        "inputs.embed": "embed_tokens_per_layer.weight",
        "inputs.projection": "per_layer_model_projection.weight",
        "inputs.norm": "per_layer_projection_norm.weight",
    }
    huggingface_parts: ClassVar = {
        **Gemma3.huggingface_parts,
        **{f"shared.{part}": Gemma3.huggingface_parts[part] for part in MLP},
        **{f"experts.{part}": f"experts.{{}}.{part}_proj.weight" for part in MLP},
        "router": "router.proj.weight",
        "router_norm": "router.scale",
        "expert_factors": "router.per_expert_scale",
        "experts_norm": "pre_feedforward_layernorm_2.weight",
        "shared_post_norm": "post_feedforward_layernorm_1.weight",
        "experts_post_norm": "post_feedforward_layernorm_2.weight",
        "scale": "layer_scalar",
        "input_gate": "per_layer_input_gate.weight",
        "input_projection": "per_layer_projection.weight",
        "input_norm": "post_per_layer_input_norm.weight",
    }

    def describe(self, source: ConfigSource) -> ModelConfig:
        if source.get("use_bidirectional_attention") == "all" or source.biases:
            raise source.unsupported("attention in both directions, or with biases")
        windows = [*windows_by_pattern(source)[:-1], None]  # the last layer is global, whatever the file says
        shared = source.integer("num_kv_shared_layers") if source.get("num_kv_shared_layers") else 0
        made = len(windows) - shared
        sources = {window: i for i, window in enumerate(windows[: max(made, 0)])}  # the last of each kind
        if missing := set(windows) - sources.keys():
            raise source.bad("num_kv_shared_layers", f"fewer, as no layer makes keys with the window {missing}", shared)
        sizes = source.integers("intermediate_size")
        if source.get("use_double_wide_mlp"):
            sizes = [size * (1 if i < made else 2) for i, size in enumerate(sizes)]
        activation = activation_of(source, "hidden_activation", "gelu_tanh")
        layers: list[Layer] = []
        for i, (window, size) in enumerate(zip(windows, sizes, strict=True)):
            attention = self._attention(source, i, window)
            if i >= made:
                attention = replace(attention, source=sources[window], keys_as_values=False)
            layers.append(Layer(attention, self._feed_forward(source, size, activation), post_norms=True, scaled=True))
        inputs = source.get("hidden_size_per_layer_input")
        cap = source.get("final_logit_softcapping")
        return model_of(
            source,
            self,
            layers,
            embedding_scale=source.integer("hidden_size") ** 0.5,
            logit_cap=None if cap is None else source.checked("final_logit_softcapping", cap),
            token_inputs=source.integer("hidden_size_per_layer_input") if inputs else 0,
        )

    def _feed_forward(self, source: ConfigSource, size: int, activation: Activation) -> GatedMLP | Experts:
        if not source.get("num_experts" if source.format == "gguf" else "enable_moe_block"):
            return GatedMLP(size, activation)
        count, chosen = source.integer("num_experts", limit=1 << 16), source.integer("top_k_experts")
        if chosen > count:
            raise source.wrong("top_k_experts", f"at most the {count} experts")
        beside: dict[str, Any] = {"shared_size": size, "shared_gated": False, "own_norms": True, "factors": True}
        return Experts(count, chosen, source.integer("moe_intermediate_size"), activation, **beside)

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """What the router reads is divided by the square root of its size."""

        def divided(tensor: RawTensor) -> RawTensor:
            return tensor.with_floats(tensor.dequantize() * config.hidden_size**-0.5)

        mixed = (i for i, layer in enumerate(config.layers) if isinstance(layer.feed_forward, Experts))
        return {f"layers.{i}.router_norm": divided for i in mixed}

    def _attention(self, source: ConfigSource, layer: int, window: int | None) -> Attention:
        heads, kv_heads = source.integer("num_attention_heads"), source.integers("num_key_value_heads")[layer]
        if source.format == "gguf":
            dim = source.integer("head_dim" if window is None else "head_dim_swa", limit=MAX_HEAD_DIM)
            own = layer in source.without_values
        else:
            own = window is None and bool(source.get("attention_k_eq_v"))
            dim = source.integer("global_head_dim" if window is None else "head_dim", limit=MAX_HEAD_DIM)
            if own and source.get("num_global_key_value_heads"):
                kv_heads = source.integer("num_global_key_value_heads")
            stated: Any = source.get("per_layer_config") or {}  # as transformers 5 writes it
            stated = stated.get(str(layer), {}) if isinstance(stated, dict) else None
            if not isinstance(stated, dict):
                raise source.wrong("per_layer_config", "an object for each layer")
            dim, kv_heads = stated.get("head_dim", dim), stated.get("num_key_value_heads", kv_heads)
        if not all(type(n) is int and 0 < n < MAX_HEAD_DIM for n in (dim, kv_heads)) or heads % kv_heads or dim % 2:
            raise source.bad("head_dim", f"one that fits {heads} heads and {kv_heads} KV heads", dim)
        rope = source.rope(dim, "full_attention" if window is None else "sliding_attention")
        return Attention(*(heads, kv_heads, dim, 1.0, rope, window), qk_norm=True, value_norm=True, keys_as_values=own)


class Gemma4Unified(Gemma4):
    """Gemma 4 12B (text): files whose images and sounds go straight to the model."""

    name = "gemma4_unified"
    gguf = None  # its files are those of `Gemma4`
    model_types = ("gemma4_unified_text", "gemma4_unified")
    transformers = "Gemma4UnifiedForCausalLM"
