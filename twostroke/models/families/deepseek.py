"""DeepSeek-V2 and V3: latent attention (MLA), and experts beside shared ones behind the first layers.

V2-Lite has no vector between a layer's input and its queries. GGUF files of the same form have V3's layers too, and
those of GLM-4.7-Flash.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_GUESSER,
    GGUF_PARTS,
    GGUF_SHARED_PARTS,
    HUGGINGFACE_EXPERT_PARTS,
    HUGGINGFACE_PARTS,
    MAX_HEAD_DIM,
    MLP,
    Family,
    Transform,
    experts_of,
    in_groups,
    mlp_of,
    model_of,
)
from twostroke.models.families.head_layouts import permuted
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.latent import Latent
from twostroke.models.rope import yarn_mscale

MAX_HEADS = 1 << 10
SIGMOID = 2  # of experts, in GGUF files
# GLM-4.7-Flash's files do not name their sigmoids; llama.cpp knows them by this size.
GLM_VOCAB = 154880


class DeepSeekV2(Family):
    """arXiv:2405.04434."""

    name, gguf = "deepseek_v2", "deepseek2"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    transformers = "DeepseekV2ForCausalLM"
    latent = True
    gguf_keys: ClassVar = {
        **GGUF_EXPERT_KEYS,
        "kv_lora_rank": "attention.kv_lora_rank",
        "q_lora_rank": "attention.q_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
        "qk_head_dim": "attention.key_length_mla",
        "v_head_dim": "attention.value_length_mla",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    }
    gguf_defaults: ClassVar = {
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
    }
    gguf_parts: ClassVar = {
        **GGUF_PARTS,
        **GGUF_EXPERT_PARTS,
        **GGUF_SHARED_PARTS,
        "q_down": "attn_q_a.weight",
        "q_down_norm": "attn_q_a_norm.weight",
        "q_up": "attn_q_b.weight",
        "kv_down": "attn_kv_a_mqa.weight",
        "kv_norm": "attn_kv_a_norm.weight",
        "heads.k_up": "attn_k_b.weight",
        "heads.v_up": "attn_v_b.weight",
        "selection_bias": "exp_probs_b.bias",
    }
    huggingface_parts: ClassVar = {
        **HUGGINGFACE_PARTS,
        **HUGGINGFACE_EXPERT_PARTS,
        "q_down": "self_attn.q_a_proj.weight",
        "q_down_norm": "self_attn.q_a_layernorm.weight",
        "q_up": "self_attn.q_b_proj.weight",
        "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
        "kv_norm": "self_attn.kv_a_layernorm.weight",
        "heads.k_up": "self_attn.kv_b_proj.{}.k.weight",
        "heads.v_up": "self_attn.kv_b_proj.{}.v.weight",
        "selection_bias": "mlp.gate.e_score_correction_bias",
        **{f"shared.{part}": f"mlp.shared_experts.{part}_proj.weight" for part in MLP},
    }

    gguf_guesser: ClassVar = GGUF_GUESSER

    def describe(self, source: ConfigSource) -> ModelConfig:
        if source.biases or source.get("rope_interleave") is False:
            raise source.unsupported("biases of attention, or RoPE on halves of a head")
        attention = self._attention(source)
        layers = [Layer(attention, self._feed_forward(source, dense)) for dense in self._dense(source)]
        return model_of(source, self, layers)

    def _attention(self, source: ConfigSource) -> Attention:
        def size(key: str) -> int:
            return source.integer(key, limit=MAX_HEAD_DIM)

        heads, rank = source.integer("num_attention_heads", limit=MAX_HEADS), size("kv_lora_rank")
        turned = size("qk_rope_head_dim")
        if source.format == "gguf" and source.get("qk_head_dim") is None:
            raise source.unsupported("heads in one matrix (attn_kv_b): convert it with a newer llama.cpp")
        plain = size("qk_nope_head_dim") if source.format == "huggingface" else size("qk_head_dim") - turned
        if rank % 2 or turned % 2 or plain <= 0:
            raise source.bad("kv_lora_rank", f"even, as qk_rope_head_dim, and heads larger than that {turned}", rank)
        queries = None if source.get("q_lora_rank") is None else source.integer("q_lora_rank")
        latent = Latent(rank, turned, plain, size("v_head_dim"), queries)
        rope, factor, strength = source.rope(turned), 1.0, 0.0
        if source.format == "gguf":
            # llama.cpp takes both of YaRN's scales to be the same, and its converter stores a tenth.
            if multiplier := source.get("rope.scaling.yarn_log_multiplier"):
                factor = source.number("rope.scaling.factor")
                rope, strength = replace(rope, amplitude=1.0), 10 * source.checked("yarn_log_multiplier", multiplier)
        else:
            stated: dict[str, Any] = source.get("rope_scaling") or source.get("rope_parameters") or {}
            if stated.get("rope_type", stated.get("type", "default")) != "default" and stated.get("mscale_all_dim"):
                factor = source.checked("factor", stated.get("factor"))
                strength = source.checked("mscale_all_dim", stated["mscale_all_dim"])
        # Scores by the square of YaRN's factor of queries and keys, also where these are not rotated.
        scale = latent.query**-0.5 * yarn_mscale(factor, strength) ** 2
        return Attention(heads, 1, latent.entry, scale, replace(rope, rotated=turned), latent=latent)

    def _dense(self, source: ConfigSource) -> list[bool]:
        """Whether each layer has an MLP in place of experts."""
        first, kinds = source.get("first_k_dense_replace"), source.get("mlp_layer_types")
        if isinstance(kinds, list):
            if len(kinds) != source.num_layers or not {*map(str, kinds)} <= {"dense", "sparse"}:
                raise source.wrong("mlp_layer_types", f"dense or sparse for each of {source.num_layers} layers")
            return [kind == "dense" for kind in kinds]
        if type(first) is not int or not 0 <= first <= source.num_layers:
            raise source.wrong("first_k_dense_replace", f"from 0 to {source.num_layers}")
        return [layer < first for layer in range(source.num_layers)]

    def _feed_forward(self, source: ConfigSource, dense: bool) -> GatedMLP | Experts:
        if dense:
            return mlp_of(source)
        sigmoid, normalized = self.sigmoid(source), bool(source.get("norm_topk_prob"))
        if normalized and not sigmoid:
            raise source.unsupported("weights of experts that are divided by their sum, without sigmoids")
        shared = source.get("n_shared_experts") or 0
        found = experts_of(source, "moe_intermediate_size", normalized)
        found = found if source.get("topk_method") == "greedy" else in_groups(source, found, sigmoid)
        if shared:
            shared = source.integer("n_shared_experts", limit=1 << 10)
        return replace(
            found,
            shared_size=shared * found.intermediate_size,
            shared_gated=False,
            sigmoid=sigmoid,
            selection_bias=sigmoid,
            scale=source.number("routed_scaling_factor"),
        )

    def sigmoid(self, source: ConfigSource) -> bool:
        """Whether weights of experts are sigmoids, with a bias for the choice."""
        kind = source.get("expert_gating_func")
        return source.format == "gguf" and (kind == SIGMOID or (kind is None and source.vocab_size == GLM_VOCAB))

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """The two numbers of a pair are neighbours in files, at the end of each head."""
        found: dict[str, Transform] = {}
        for i, attention in config.attention_layers.items():
            latent = attention.latent
            assert latent is not None, "all layers of the family have it"
            queries = "q" if latent.query_rank is None else "q_up"
            found[f"layers.{i}.{queries}"] = _apart(latent.plain, latent.rotated)
            found[f"layers.{i}.kv_down"] = _apart(latent.rank, latent.rotated)
        return found


class DeepSeekV3(DeepSeekV2):
    """Sigmoids of experts, with a bias for their choice (arXiv:2412.19437).

    Files end with a layer that guesses further tokens, with copies of the embeddings and of the head.
    """

    name = "deepseek_v3"
    gguf = None  # its files are those of `DeepSeekV2`
    model_types = ("deepseek_v3", "kimi_k2")
    transformers = "DeepseekV3ForCausalLM"
    guess_layers = True
    huggingface_guesser: ClassVar = {
        "norm": "shared_head.norm.weight",
        "join.projection": "eh_proj.weight",
        "join.embed_norm": "enorm.weight",
        "join.hidden_norm": "hnorm.weight",
    }

    def sigmoid(self, source: ConfigSource) -> bool:
        return True


class Glm4MoELite(DeepSeekV3):
    name = "glm4_moe_lite"
    model_types = ("glm4_moe_lite",)
    transformers = "Glm4MoeLiteForCausalLM"


def _apart(before: int, rotated: int) -> Callable[[RawTensor], RawTensor]:
    """Puts the second numbers of pairs behind the first ones, at the end of every head."""
    pairs = np.arange(before, before + rotated)
    return permuted(np.concatenate([np.arange(before), pairs[::2], pairs[1::2]]))
