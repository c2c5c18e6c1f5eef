"""Each family in a GGUF file, written from a Hugging Face directory as llama.cpp's converter does: the same logits."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models.test_against_transformers import all_logits, tokens
from tests.tiny import VOCAB, write_model
from twostroke.api.llm import LLM
from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {
    "embed_tokens": "token_embd",
    "embedding_norm": "token_embd_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "final_layernorm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
Metadata = Callable[[gguf.GGUFWriter, Mapping[str, Any]], object]


@dataclass(frozen=True)
class Converted:
    """What llama.cpp's converter makes of a family.

    Attributes:
        parts: names that differ from the usual ones.
        permuted: whether it interleaves the halves of each head of q and k.
        metadata: writes further keys, from config.json.
        sizes: changes of the tiny model, where GGUF lacks what it has.
        joined: whether Q, K and V are one matrix there, with one bias.
        apart: whether each expert has a tensor of its own.
    """

    arch: str
    parts: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    metadata: Metadata = lambda writer, values: None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    joined: bool = False
    apart: bool = False


def partial_rope(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_rope_dimension_count(int(values["head_dim"] * values["rope_parameters"]["partial_rotary_factor"]))


def phi3(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    rope = values["rope_parameters"]
    writer.add_rope_dimension_count(24)
    writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    writer.add_rope_scaling_orig_ctx_len(values["original_max_position_embeddings"])
    writer.add_sliding_window(values["sliding_window"])
    for which in ("long", "short"):
        writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))


def llama3(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    rope = values["rope_parameters"]
    dim = values["hidden_size"] // values["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def gemma3(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_sliding_window(values["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in values["layer_types"]])
    rope = values["rope_parameters"]["sliding_attention"]
    writer.add_float32("gemma3.rope.freq_base_swa", rope["rope_theta"])


def qwen3moe(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_expert_count(values.get("num_experts", values.get("num_local_experts")))
    writer.add_expert_used_count(values["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(values["moe_intermediate_size"])


def mixtral(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_expert_count(values["num_local_experts"])
    writer.add_expert_used_count(values["num_experts_per_tok"])
    writer.add_sliding_window(values["sliding_window"])


def gemma2(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    writer.add_sliding_window(values["sliding_window"])


def granite(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_embedding_scale(values["embedding_multiplier"])
    writer.add_attention_scale(values["attention_multiplier"])
    writer.add_residual_scale(values["residual_multiplier"])
    writer.add_logit_scale(values["logits_scaling"])


def granite4(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    granite(writer, values)
    writer.add_rope_scaling_finetuned(False)  # no RoPE


def yarn(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def olmo3(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    yarn(writer, values["rope_parameters"]["full_attention"])
    writer.add_rope_scaling_yarn_attn_factor(values["rope_parameters"]["full_attention"]["attention_factor"])
    writer.add_sliding_window(values["sliding_window"])


def ministral3(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    rope = values["rope_parameters"]
    yarn(writer, rope)
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def qwen2moe(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    qwen3moe(writer, values)
    writer.add_expert_shared_feed_forward_length(values["shared_expert_intermediate_size"])


def gpt_oss(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    yarn(writer, values["rope_parameters"])
    writer.add_sliding_window(values["sliding_window"])
    writer.add_expert_count(values["num_local_experts"])
    writer.add_expert_used_count(values["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(values["intermediate_size"])


def gemma4(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    layers, shared, width = values["layer_types"], values["num_kv_shared_layers"], values["intermediate_size"]
    sliding = [kind == "sliding_attention" for kind in layers]
    of_global = values["per_layer_config"][str(len(layers) - 1)]
    whole, heads = of_global["head_dim"], of_global.get("num_key_value_heads", values["num_key_value_heads"])
    writer.add_key_length_swa(values["head_dim"])
    writer.add_value_length_swa(values["head_dim"])
    writer.add_rope_dimension_count(whole)
    writer.add_head_count_kv([values["num_key_value_heads"] if slides else heads for slides in sliding])
    writer.add_feed_forward_length([width * (2 if i >= len(layers) - shared else 1) for i in range(len(layers))])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(values["hidden_size_per_layer_input"])
    writer.add_sliding_window(values["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    if values["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    turned = int(values["rope_parameters"]["full_attention"]["partial_rotary_factor"] * whole / 2)
    factors = np.array([1.0] * turned + [1e30] * (whole // 2 - turned), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def gemma4_moe(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    gemma4(writer, values)
    qwen3moe(writer, {**values, "num_experts_per_tok": values["top_k_experts"]})


def with_factors(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Gemma 4's: experts stay in stacks, whose factors are beside one of them."""
    renamed = {name.replace("router.per_expert_scale", "factors.scale"): tensor for name, tensor in tensors.items()}
    return {name + ".weight" * name.endswith(("_proj", "layer_scalar")): tensor for name, tensor in renamed.items()}


def qwen35(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    partial_rope(writer, values)
    writer.add_ssm_conv_kernel(values["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(values["linear_key_head_dim"])
    writer.add_ssm_group_count(values["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values["linear_num_value_heads"])
    writer.add_ssm_inner_size(values["linear_num_value_heads"] * values["linear_value_head_dim"])
    writer.add_full_attention_interval(4)
    recurrent = [kind == "linear_attention" for kind in values["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)


QWEN35 = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.dt": "ssm_dt",
    "linear_attn.decay": "",
} | {part: part for part in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")}
GUESSER = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def with_guesser(tensors: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The head of multi-token prediction as one more layer, without copies of embeddings."""
    inner = f"model.layers.{layers}."
    copies = (f"{inner}embed_tokens.weight", f"{inner}shared_head.head.weight")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
    renamed = {name: inner + GUESSER.get(name, name.removeprefix("mtp.layers.0.")) for name in tensors}
    return {renamed[name] if name.startswith("mtp.") else name: tensor for name, tensor in tensors.items()}


def exponential(values: np.ndarray) -> np.ndarray:
    """float32, rounded from float64 as by `RawTensor.exponential`."""
    return np.exp(values.astype(np.float64)).astype(np.float32)


def tiled(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Qwen3.5's: heads of v in turn for each head of k, the decays themselves, and whole factors of norms."""
    keys, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    key_size, dim = keys * values["linear_key_head_dim"], values["linear_value_head_dim"]

    def turned(tensor: np.ndarray, size: int) -> np.ndarray:
        return tensor.reshape(keys, heads // keys, size, -1).swapaxes(0, 1).reshape(tensor.shape)

    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        part = name.rpartition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            tensor = tensor.reshape(len(tensor), -1)
            tensor = np.concatenate([tensor[: 2 * key_size], turned(tensor[2 * key_size :], dim)])
        elif part == "in_proj_z.weight":
            tensor = turned(tensor, dim)
        elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            tensor = turned(tensor, 1)
        elif part == "out_proj.weight":
            tensor = np.ascontiguousarray(turned(np.ascontiguousarray(tensor.T), dim).T)
        elif name.endswith("norm.weight") and part != "norm.weight":
            tensor = tensor + np.float32(1)
        if part == "A_log":
            name, tensor = name.replace("A_log", "decay.ssm_a"), -exponential(tensor)
        found[name.replace("dt_bias", "dt.bias")] = tensor
    return found


def lfm2(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    heads = values["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in values["layer_types"]])
    writer.add_shortconv_l_cache(values["conv_L_cache"])


LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}


def lfm2moe(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    lfm2(writer, values)
    writer.add_expert_count(values["num_experts"])
    writer.add_expert_used_count(values["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    writer.add_leading_dense_block_count(values["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def granite4_hybrid(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    granite4(writer, values)
    heads = values["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in values["layer_types"]])
    writer.add_expert_count(values["num_local_experts"])
    writer.add_expert_used_count(values["num_experts_per_tok"])
    writer.add_expert_shared_feed_forward_length(values["shared_intermediate_size"])
    writer.add_ssm_conv_kernel(values["mamba_d_conv"])
    writer.add_ssm_state_size(values["mamba_d_state"])
    writer.add_ssm_group_count(values["mamba_n_groups"])
    writer.add_ssm_inner_size(values["mamba_expand"] * values["hidden_size"])
    writer.add_ssm_time_step_rank(values["mamba_n_heads"])


GRANITE4_HYBRID = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt": "ssm_dt",
    "mamba.decay": "",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_exps+ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_gate_shexp+ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}


def mamba(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The decays themselves, an axis more for what each head has, and norms by group."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        inner, _, part = name.rpartition(".")
        if part == "A_log":
            name, tensor = f"{inner}.decay.ssm_a", -exponential(tensor)[:, None]
        elif part == "D":
            name, tensor = f"{inner}.decay.ssm_d", tensor[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.reshape(values.get("mamba_n_groups", values.get("n_groups")), -1)
        elif name.endswith("conv1d.weight"):
            tensor = tensor.reshape(len(tensor), -1)
        found[name.replace("dt_bias", "dt.bias")] = tensor
    return found


LFM2_MOE = LFM2 | {
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
    "feed_forward.experts.{}.w1": "ffn_gate_exps",
    "feed_forward.experts.{}.w2": "ffn_down_exps",
    "feed_forward.experts.{}.w3": "ffn_up_exps",
}


def qwen35moe(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    qwen2moe(writer, values)
    qwen35(writer, values)


def deepseek2(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    rope, turned = values["rope_parameters"], values["qk_rope_head_dim"]
    writer.add_kv_lora_rank(values["kv_lora_rank"])
    if values["q_lora_rank"]:
        writer.add_q_lora_rank(values["q_lora_rank"])
    writer.add_key_length_mla(values["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(values["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    if rope["rope_type"] == "yarn":
        yarn(writer, rope)
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    else:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
    writer.add_expert_count(values["n_routed_experts"])
    writer.add_expert_used_count(values["num_experts_per_tok"])
    writer.add_expert_shared_count(values["n_shared_experts"])
    writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    writer.add_expert_weights_scale(values["routed_scaling_factor"])
    writer.add_leading_dense_block_count(1)
    if (values.get("n_group") or 1) > 1:
        writer.add_expert_group_count(values["n_group"])
        writer.add_expert_group_used_count(values["topk_group"])


DEEPSEEK2 = {
    **{part: f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm": "nextn.shared_head_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate.e_score_correction": "exp_probs_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}


def falcon_h1(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(values["mamba_d_conv"])
    writer.add_ssm_state_size(values["mamba_d_state"])
    writer.add_ssm_group_count(values["mamba_n_groups"])
    writer.add_ssm_time_step_rank(values["mamba_n_heads"])
    writer.add_ssm_inner_size(values["mamba_d_ssm"])


def multiplied(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Falcon-H1's matrices with their factors."""
    found = mamba(tensors, values)
    gate, down = values["mlp_multipliers"]
    into, out = values["attention_in_multiplier"], values["attention_out_multiplier"]
    factors = {"gate_proj": gate, "down_proj": down, "o_proj": out, "q_proj": into, "v_proj": into}
    factors |= {"k_proj": into * values["key_multiplier"], "mamba.out_proj": values["ssm_out_multiplier"]}
    factors |= {"lm_head": values["lm_head_multiplier"], "embed_tokens": values["embedding_multiplier"]}
    groups, inner = values["mamba_n_groups"] * values["mamba_d_state"], values["mamba_d_ssm"]
    parts = np.repeat(values["ssm_multipliers"], [inner, inner, groups, groups, values["mamba_n_heads"]])
    for name, tensor in tensors.items():
        if name.endswith("mamba.in_proj.weight"):
            found[name] = tensor * (values["ssm_in_multiplier"] * parts)[:, None].astype(np.float32)
        elif factor := next((one for part, one in factors.items() if name.endswith(f"{part}.weight")), None):
            found[name] = tensor * np.float32(factor)
    # Which has no ending there.
    return {name.replace("pre_ff_layernorm.weight", "mamba.decay.ffn_norm"): one for name, one in found.items()}


def nemotron_h(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    kinds, sizes = values["layers_block_type"], {"mlp": values["intermediate_size"], "moe": 1}
    writer.add_head_count_kv([values["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([sizes.get(kind, 0) for kind in kinds])
    writer.add_ssm_conv_kernel(values["conv_kernel"])
    writer.add_ssm_state_size(values["ssm_state_size"])
    writer.add_ssm_group_count(values["n_groups"])
    writer.add_ssm_time_step_rank(values["mamba_num_heads"])
    writer.add_ssm_inner_size(values["mamba_num_heads"] * values["mamba_head_dim"])
    if "moe" in kinds:
        writer.add_expert_count(values["n_routed_experts"])
        writer.add_expert_used_count(values["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(values["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(values["routed_scaling_factor"])


def one_part(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Nemotron-H's."""
    found = mamba(tensors, values)
    return {name.replace("correction_bias", "correction.bias"): tensor for name, tensor in found.items()}


def absorbed(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The matrices of heads apart, that of keys the other way round."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in unstacked(tensors).items():
        if name.endswith("kv_b_proj.weight"):
            each = tensor.reshape(values["num_attention_heads"], -1, values["kv_lora_rank"])
            k, v = np.split(each, [values["qk_nope_head_dim"]], 1)
            found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(k.swapaxes(1, 2))
            found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(v)
        else:
            found[name.replace("correction_bias", "correction.bias")] = tensor
    return found


def qkvz_split(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Qwen3-Next's q, k and v together, and z apart; the rest as for Qwen3.5, but heads of v stay where they are."""
    keys, k_dim = values["linear_num_key_heads"], values["linear_key_head_dim"]
    size = values["linear_num_value_heads"] // keys * values["linear_value_head_dim"]
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            heads = tensor.reshape(keys, -1, tensor.shape[1])
            parts = np.split(heads, [k_dim, 2 * k_dim, 2 * k_dim + size], 1)
            *qkv, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = np.concatenate(qkv), z
        else:
            found[name] = tensor
    return tiled(found, {**values, "linear_num_key_heads": 1, "linear_key_head_dim": keys * k_dim})


FALCON_H1 = {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
NEMOTRON_H = {
    "norm": "attn_norm",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    "mixer.o_proj": "attn_output",
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mixer.experts.{{}}.{part}_proj": f"ffn_{part}_exps" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction": "exp_probs_b",
}
MIXER = {f"mixer.{part.removeprefix('mamba.')}": theirs for part, theirs in GRANITE4_HYBRID.items() if "mamba" in part}
QWEN3_NEXT = {"linear_attn.in_proj_ba": "ssm_ba"}
EXPERTS = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{}.w2": "ffn_down_exps",
    "block_sparse_moe.experts.{}.w3": "ffn_up_exps",
}
EARLY = EXPERTS | {
    f"block_sparse_moe.experts.{{}}.w{i}": f"ffn_{part}.{{}}" for i, part in enumerate(("gate", "down", "up"), 1)
}
GLM4_NORMS = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
SHARED = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
GPT_OSS = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
}
OLMO = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA2 = OLMO | {"pre_feedforward_layernorm": "ffn_norm"}
GEMMA4 = GEMMA2 | {
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
GEMMA4_MOE = GEMMA4 | {
    "router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "factors": "ffn_down_exps",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
GRANITE4 = {"shared_mlp.input_linear": "ffn_gate+ffn_up", "shared_mlp.output_linear": "ffn_down"}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
CONVERTED = {
    "llama": Converted("llama", permuted=True),
    "llama3-rope": Converted("llama", permuted=True, metadata=llama3),
    "mistral": Converted(
        "llama", permuted=True, metadata=lambda w, values: w.add_sliding_window(values["sliding_window"])
    ),
    "qwen2": Converted("qwen2"),
    "qwen3": Converted("qwen3", QK_NORMS),
    "qwen3moe": Converted("qwen3moe", QK_NORMS | SHARED, metadata=qwen3moe, sizes={"mlp_only_layers": []}),
    "gemma3": Converted("gemma3", GEMMA2, metadata=gemma3),
    "smollm3": Converted("smollm3", permuted=True, sizes={"no_rope_layers": None}),  # llama.cpp has its own rule
    "granite": Converted("granite", permuted=True, metadata=granite),
    "granite4": Converted("granite", GRANITE4, permuted=True, metadata=granite4, sizes={"intermediate_size": 96}),
    "granite4-hybrid": Converted("granitehybrid", GRANITE4_HYBRID, permuted=True, metadata=granite4_hybrid),
    "gemma2": Converted("gemma2", GEMMA2, metadata=gemma2, sizes={"query_pre_attn_scalar": 32}),  # head_dim
    "olmo2": Converted("olmo2", OLMO),
    "olmo3": Converted("olmo2", OLMO, metadata=olmo3),
    "ministral3": Converted("mistral3", permuted=True, metadata=ministral3),
    "qwen2moe": Converted("qwen2moe", SHARED, metadata=qwen2moe, sizes={"mlp_only_layers": []}),
    "phi3": Converted("phi3", FUSED, metadata=phi3),
    "glm4": Converted("glm4", FUSED | GLM4_NORMS, metadata=partial_rope),
    "glm": Converted("chatglm", FUSED, metadata=partial_rope, joined=True),
    "gemma4": Converted("gemma4", GEMMA4, metadata=gemma4),
    "gemma4-12b": Converted("gemma4", GEMMA4, metadata=gemma4),
    "gemma4-moe": Converted("gemma4", GEMMA4_MOE, metadata=gemma4_moe),
    "gpt_oss": Converted("gpt-oss", GPT_OSS, metadata=gpt_oss),
    "qwen3_5": Converted("qwen35", QWEN35, metadata=qwen35),
    "qwen3_5, even": Converted("qwen35", QWEN35, metadata=qwen35, sizes={"linear_num_value_heads": 2}),
    "deepseek_v2": Converted("deepseek2", SHARED | DEEPSEEK2, metadata=deepseek2),
    "glm4_moe_lite": Converted("deepseek2", SHARED | DEEPSEEK2, metadata=deepseek2),
    "deepseek_v3": Converted("deepseek2", SHARED | DEEPSEEK2, metadata=deepseek2),
    "falcon_h1": Converted("falcon-h1", GRANITE4_HYBRID | FALCON_H1, metadata=falcon_h1),
    "falcon_h1, normed": Converted(
        "falcon-h1",
        GRANITE4_HYBRID | FALCON_H1,
        metadata=falcon_h1,
        sizes={"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": Converted("nemotron_h", NEMOTRON_H | MIXER, metadata=nemotron_h),
    "nemotron_h_moe": Converted("nemotron_h_moe", NEMOTRON_H | MIXER, metadata=nemotron_h),
    "lfm2": Converted("lfm2", LFM2, metadata=lfm2),
    "lfm2moe": Converted("lfm2moe", LFM2_MOE, metadata=lfm2moe),
    "qwen3_5moe": Converted("qwen35moe", QWEN35 | SHARED, metadata=qwen35moe),
    "qwen3_next": Converted("qwen3next", QWEN35 | SHARED | QWEN3_NEXT, metadata=qwen35moe),
    "mixtral": Converted("llama", EXPERTS, permuted=True, metadata=mixtral),
    "mixtral, early": Converted("llama", EARLY, permuted=True, metadata=mixtral, apart=True),
}


def unstacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss's experts one by one, as blocks if they are MXFP4; and names that end as others do."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        inner, _, part = name.rpartition(".")
        if inner.endswith(".conv"):
            tensor = tensor.reshape(len(tensor), -1)
        if part.endswith("_scales"):
            continue
        if part.endswith("_blocks"):  # two neighbours in a byte there, two that are 16 apart here
            numbers = np.stack((tensor & 15, tensor >> 4), -1).reshape(*tensor.shape[:-1], 2, 16)
            scales = tensors[name.removesuffix("_blocks") + "_scales"][..., None]
            blocks = np.concatenate((scales, numbers[..., 0, :] | numbers[..., 1, :] << 4), -1)
            part, tensor = part.removesuffix("_blocks"), blocks.reshape(*tensor.shape[:2], -1).swapaxes(1, 2)
        kind = "bias" if part.endswith("_bias") else "weight"
        if not part.startswith(("gate_up_proj", "down_proj")) or not inner.endswith("experts"):
            kind = {"sinks": ".weight", "layer_scalar": ".weight", "expert_bias": ".bias"}.get(part, "")
            found[name + kind] = tensor
            continue
        for e, one in enumerate(tensor if kind == "bias" else tensor.swapaxes(1, 2)):
            rows = {"gate": one[::2], "up": one[1::2]} if part.startswith("gate_up") else {"down": one}
            found |= {f"{inner}.{e}.{side}_proj.{kind}": some for side, some in rows.items()}
    return found


def convert(directory: Path, path: Path, made: Converted) -> Path:
    """Write a GGUF file of the model in float32, without a tokenizer."""
    values = json.loads((directory / "config.json").read_text())
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, made.arch)
    writer.add_tokenizer_model("no_vocab")  # llama.cpp runs the file
    writer.add_vocab_size(values["vocab_size"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    stored = load_file(directory / "model.safetensors")
    layers = values.get("num_hidden_layers") or len(values["layers_block_type"])
    guesses = "mtp.fc.weight" in stored or f"model.layers.{layers}.eh_proj.weight" in stored
    writer.add_block_count(layers + guesses)
    if guesses:
        writer.add_uint32(f"{made.arch}.nextn_predict_layers", 1)
    writer.add_head_count(heads)
    if made.arch != "gemma4":
        writer.add_feed_forward_length(values.get("intermediate_size", 0))
    else:
        head_dim = values["per_layer_config"][str(values["num_hidden_layers"] - 1)]["head_dim"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    differing = ("gemma4", "lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
    if made.arch not in differing:  # whose layers differ in them
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(values.get("rms_norm_eps", values.get("norm_eps", values.get("layer_norm_epsilon"))))
    parameters = values.get("rope_parameters", {"rope_theta": 1e4})
    writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])
    made.metadata(writer, values)
    stacks, joined = dict[str, dict[int, np.ndarray]](), dict[str, dict[int, np.ndarray]]()
    changed = {
        "qwen35": tiled,
        "qwen35moe": tiled,
        "qwen3next": qkvz_split,
        "granitehybrid": mamba,
        "falcon-h1": multiplied,
        "nemotron_h": one_part,
        "nemotron_h_moe": one_part,
        "gemma4": with_factors,
        "deepseek2": absorbed,
    }.get(made.arch, lambda tensors, _: unstacked(tensors))
    for name, tensor in changed(with_guesser(stored, layers), values).items():
        if made.arch in ("gemma2", "gemma3", "gemma-embedding") and "norm" in name:
            tensor = tensor + np.float32(1)
        inner, _, kind = name.removeprefix("model.").removeprefix("backbone.").rpartition(".")
        if not inner.startswith("layers."):
            outer = OUTER[inner]
            writer.add_tensor(f"{outer}.weight", tensor)
            continue
        _, number, part = inner.split(".", 2)
        expert = next((word for word in part.split(".") if word.isdecimal()), None)
        theirs = (PARTS | dict(made.parts))[part if expert is None else part.replace(f".{expert}.", ".{}.")]
        if made.permuted and theirs in ("attn_q", "attn_k"):
            count = heads if theirs == "attn_q" else kv_heads
            tensor = tensor.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        if "shexp" in theirs and len(tensor) == 1:
            tensor = tensor[0]
        if "+" in theirs:
            for half, one in zip(np.split(tensor, 2, axis=-2), theirs.split("+"), strict=True):
                writer.add_tensor(f"blk.{number}.{one}.{kind}", np.ascontiguousarray(half))
        elif made.joined and theirs in ("attn_q", "attn_k", "attn_v"):
            joined.setdefault(f"blk.{number}.attn_qkv.{kind}", {})["qkv".index(theirs[-1])] = tensor
        elif expert is not None and made.apart:
            writer.add_tensor(f"blk.{number}.{theirs.format(expert)}.{kind}", tensor)
        elif expert is not None:
            stacks.setdefault(f"blk.{number}.{theirs}.{kind}", {})[int(expert)] = tensor
        else:
            theirs = f"{theirs}.{kind}" if theirs else kind
            writer.add_tensor(f"blk.{number}.{theirs}", np.ascontiguousarray(tensor))
    for name, found in joined.items():
        writer.add_tensor(name, np.concatenate([found[i] for i in range(3)]))
    for name, found in stacks.items():
        stack = np.stack([found[i] for i in range(len(found))])
        kind = gguf.GGMLQuantizationType.MXFP4 if stack.dtype == np.uint8 else None
        writer.add_tensor(name, stack, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", CONVERTED)
def test_the_same_logits(family: str, tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    made, family = CONVERTED[family], family.partition(",")[0]
    directory = write_model(family, tmp_path / "a", **made.sizes) if made.sizes else tiny_directory(family)
    theirs, mine = open_huggingface(directory), open_gguf(convert(directory, tmp_path / "a.gguf", made))
    assert mine.names() == theirs.names()
    for name in mine.names() if "qwen3_5" not in family or not mine.config.state_layers[0].tiled else ():
        if theirs.config.factors and name in ("embed", "head"):  # whose factors are the model's in directories
            continue
        assert np.array_equal(mine.tensor(name).dequantize(), theirs.tensor(name).dequantize()), name
    mine = replace(mine, tokenizer_source=theirs.tokenizer_source)
    ids = tokens(70, VOCAB, seed=5)
    found, expected = (all_logits(LLM(one, backend="reference", kv_bytes=16 << 20), ids) for one in (mine, theirs))
    assert np.abs(found - expected).max() < 2e-4  # numbers of config.json are float32 in the file


@pytest.mark.parametrize(
    ("family", "writes", "message"),
    [
        ("phi3", lambda writer: writer.add_rope_dimension_count(7), "phi3.rope.dimension_count must be an even number"),
        ("glm4", lambda writer: writer.add_rope_dimension_count(64), "rope.dimension_count must be a positive integer"),
        ("smollm3", lambda writer: writer.add_rope_dimension_count(8), "with RoPE on a part of each head"),
    ],
)
def test_bad_values_are_one_clear_error(
    family: str,
    writes: Callable[[gguf.GGUFWriter], object],
    message: str,
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    made = replace(CONVERTED[family], metadata=lambda writer, values: writes(writer))
    path = convert(tiny_directory(family), tmp_path / "a.gguf", made)
    with pytest.raises((CheckpointError, UnsupportedArchitecture), match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fused_matrix_of_the_wrong_size(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    path = convert(tiny_directory("phi3"), tmp_path / "a.gguf", CONVERTED["phi3"])
    key = b"phi3.attention.head_count_kv\4\0\0\0"  # its type is 4
    data = path.read_bytes()
    assert key + b"\1" in data
    path.write_bytes(data.replace(key + b"\1", key + b"\3"))
    with pytest.raises(CheckpointError, match=r"attn_qkv\.weight: shape .* where there are 288 rows"):
        open_gguf(path)
