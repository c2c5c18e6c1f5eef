"""Qwen3.5 and Qwen3-Next: three layers with a state (Gated DeltaNet) for each with gated attention (Qwen Team 2026)."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_GUESSER,
    GGUF_PARTS,
    HUGGINGFACE_EXPERT_PARTS,
    HUGGINGFACE_PARTS,
    Family,
    Transform,
    attention_of,
    experts_of,
    model_of,
)
from twostroke.models.families.gemma import plus_one
from twostroke.models.families.head_layouts import to_our_layout
from twostroke.models.families.hybrid_layers import FULL, RECURRENT, checked_kinds
from twostroke.models.families.qwen import SHARED_GGUF, SHARED_HUGGINGFACE, SHARED_KEYS, with_shared
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.recurrent import GatedDeltaNet, RecurrentMixer
from twostroke.models.tensor_shapes import tensor_shapes


class Qwen3_5(Family):  # the version is part of the name
    name, gguf = "qwen3_5", "qwen35"
    model_types = ("qwen3_5_text", "qwen3_5")  # "qwen3_5" has vision; its config contains the text model's
    transformers = "Qwen3_5ForCausalLM"
    partial_rope = True
    huggingface_parts: ClassVar = (
        HUGGINGFACE_PARTS
        | dict.fromkeys(("q", "q_gate"), "self_attn.q_proj.weight")
        | dict.fromkeys(("state_q", "state_k", "state_v"), "linear_attn.in_proj_qkv.weight")
        | {f"state_{part}": f"linear_attn.in_proj_{part}.weight" for part in "zba"}
        | {"conv": "linear_attn.conv1d.weight", "decay": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias"}
        | {"state_norm": "linear_attn.norm.weight", "state_o": "linear_attn.out_proj.weight"}
    )

    gguf_keys: ClassVar = {
        "layer_types": "attention.recurrent_layers",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_value_size": "ssm.inner_size",
    }
    gguf_defaults: ClassVar = {"full_attention_interval": 4}
    gguf_parts: ClassVar = (
        GGUF_PARTS
        | {"mlp_norm": "post_attention_norm.weight", "q_gate": GGUF_PARTS["q"]}
        | dict.fromkeys(("state_q", "state_k", "state_v"), "attn_qkv.weight")
        | {"state_z": "attn_gate.weight", "state_b": "ssm_beta.weight", "state_a": "ssm_alpha.weight"}
        | {"conv": "ssm_conv1d.weight", "decay": "ssm_a", "dt_bias": "ssm_dt.bias"}
        | {"state_norm": "ssm_norm.weight", "state_o": "ssm_out.weight"}
    )
    huggingface_guesser: ClassVar = {
        "norm": "norm.weight",
        "join.projection": "fc.weight",
        "join.embed_norm": "pre_fc_norm_embedding.weight",
        "join.hidden_norm": "pre_fc_norm_hidden.weight",
    }
    gguf_guesser: ClassVar = GGUF_GUESSER

    def describe(self, source: ConfigSource) -> ModelConfig:
        attention = replace(attention_of(source, qk_norm=True), output_gate=True)
        state = self.state_of(source)
        kinds = enumerate(self.kinds(source))
        layers = [Layer(state if kind == RECURRENT else attention, self.feed_forward(source, i)) for i, kind in kinds]
        return model_of(source, self, layers)

    def kinds(self, source: ConfigSource) -> list[str]:
        """The kind of each layer: a list, or every n-th one with attention."""
        kinds = source.get("layer_types")
        if source.format == "gguf" and isinstance(kinds, list):  # of booleans, also for further layers that guess
            kinds = ["linear_attention" if recurrent else FULL for recurrent in kinds[: source.num_layers]]
        if kinds is None:
            period = source.integer("full_attention_interval")
            return [RECURRENT if (i + 1) % period else FULL for i in range(source.num_layers)]
        return checked_kinds(source, "layer_types", kinds, (FULL, "linear_attention"))

    def state_of(self, source: ConfigSource) -> GatedDeltaNet:
        """The state layers. Raises CheckpointError if heads of v do not share those of k evenly."""
        keys, values = source.integer("linear_num_key_heads"), source.integer("linear_num_value_heads")
        if values % keys:
            raise source.wrong("linear_num_value_heads", f"a multiple of the {keys} heads of keys")
        k_dim, width = (
            source.integer("linear_key_head_dim", limit=1 << 14),
            source.integer("linear_conv_kernel_dim", limit=256),
        )
        if source.format == "gguf":
            size = source.integer("linear_value_size")
            if size % values or size // values >= 1 << 14:
                raise source.wrong("linear_value_size", f"a multiple of the {values} heads of values")
            return GatedDeltaNet(keys, values, k_dim, size // values, width, tiled=values > keys)
        v_dim = source.integer("linear_value_head_dim", limit=1 << 14)
        return GatedDeltaNet(keys, values, k_dim, v_dim, width)

    def row_orders(self, config: ModelConfig, format: str) -> dict[str, np.ndarray]:
        """Each head's rows of q are followed by those of its gate."""
        return {f"layers.{i}.q": _by_head(one) for i, one in config.attention_layers.items()}

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Directories store w - 1 of norms, except those of states, and the logarithm of decays; GGUF files -decay."""
        decays = (f"layers.{i}.decay" for i in config.state_layers)
        if format == "gguf":
            return dict.fromkeys(decays, _negated) | to_our_layout(config, "halves")
        norms = (name for name in tensor_shapes(config) if name.endswith("norm") and not name.endswith("state_norm"))
        shifted: dict[str, Transform] = dict.fromkeys(norms, plus_one)
        shifted |= dict.fromkeys(decays, RawTensor.exponential)
        for name, permuted in to_our_layout(config, "halves").items():
            shifted[name] = _then(shifted[name], permuted) if name in shifted else permuted
        return shifted


class Qwen3_5MoE(Qwen3_5):
    """A mixture of experts in every layer, and one that all tokens pass."""

    name, gguf = "qwen3_5_moe", "qwen35moe"
    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    transformers = "Qwen3_5MoeForCausalLM"
    gguf_keys: ClassVar = {**Qwen3_5.gguf_keys, **GGUF_EXPERT_KEYS, **SHARED_KEYS}
    huggingface_parts: ClassVar = {**Qwen3_5.huggingface_parts, **HUGGINGFACE_EXPERT_PARTS, **SHARED_HUGGINGFACE}
    gguf_parts: ClassVar = {**Qwen3_5.gguf_parts, **GGUF_EXPERT_PARTS, **SHARED_GGUF}

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        return with_shared(source, experts_of(source, "moe_intermediate_size", normalized=True))


class Qwen3Next(Qwen3_5MoE):
    """The layers of Qwen3.5 with experts before it, with other matrices in its files (2025)."""

    name, gguf = "qwen3_next", "qwen3next"
    model_types = ("qwen3_next",)
    transformers = "Qwen3NextForCausalLM"
    gguf_defaults: ClassVar = {**Qwen3_5MoE.gguf_defaults, "norm_topk_prob": True, "decoder_sparse_step": 1}
    huggingface_parts: ClassVar = {
        **Qwen3_5MoE.huggingface_parts,
        **dict.fromkeys(("state_q", "state_k", "state_v", "state_z"), "linear_attn.in_proj_qkvz.weight"),
        **dict.fromkeys(("state_b", "state_a"), "linear_attn.in_proj_ba.weight"),
    }
    gguf_parts: ClassVar = {**Qwen3_5MoE.gguf_parts, **dict.fromkeys(("state_b", "state_a"), "ssm_ba.weight")}

    def feed_forward(self, source: ConfigSource, layer: int) -> GatedMLP | Experts:
        if source.get("mlp_only_layers") or source.get("decoder_sparse_step") != 1 or not source.get("norm_topk_prob"):
            raise source.unsupported("layers without experts, or weights that are not divided by their sum")
        return super().feed_forward(source, layer)

    def state_of(self, source: ConfigSource) -> GatedDeltaNet:
        """Heads of v that share a head of k are neighbours in both kinds of files."""
        return replace(super().state_of(source), tiled=False)

    def row_orders(self, config: ModelConfig, format: str) -> dict[str, np.ndarray]:
        """Rows of one head of k follow one another: of q, k, v and z in directories, of b and a everywhere."""
        found = super().row_orders(config, format)
        for i, state in config.state_layers.items():
            shared = state.num_v_heads // state.num_k_heads
            found[f"layers.{i}.state_b"] = _by_part(state, [shared, shared])
            if format != "gguf":
                sizes = [state.k_dim, state.k_dim, shared * state.v_dim, shared * state.v_dim]
                found[f"layers.{i}.state_q"] = _by_part(state, sizes)
        return found


def _negated(tensor: RawTensor) -> RawTensor:
    return tensor.with_floats(-tensor.dequantize())


def _then(first: Transform, second: Transform) -> Transform:
    return lambda tensor: second(first(tensor))


def _by_head(attention: Attention) -> np.ndarray:
    """[2 q_size]: where the rows of q, and then of its gate, are in the file."""
    heads = np.arange(2 * attention.num_heads * attention.head_dim).reshape(attention.num_heads, 2, -1)
    return heads.swapaxes(0, 1).reshape(-1)


def _by_part(state: RecurrentMixer, sizes: list[int]) -> np.ndarray:
    """Where the rows of parts, all heads of each, are in a matrix with parts of these sizes for each head of k."""
    rows = np.arange(state.num_k_heads * sum(sizes)).reshape(state.num_k_heads, -1)
    return np.concatenate([part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], 1)])
