"""Nemotron-H and Nemotron 3 Nano: layers of Mamba-2, attention without RoPE, and MLPs or experts without a gate.

A layer of a file is one of these alone (NVIDIA 2025, arXiv:2504.03624); ours is a mixer with the feed-forward behind
it, if there is one. Steps of Mamba-2 have no least size, as in llama.cpp and vLLM; transformers has one in prefills.
"""

from dataclasses import replace
from typing import ClassVar

from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import MAX_COUNT, ConfigSource
from twostroke.models.families.family import (
    GGUF_EXPERT_KEYS,
    GGUF_EXPERT_PARTS,
    GGUF_PARTS,
    GGUF_SHARED_PARTS,
    HUGGINGFACE_PARTS,
    MATRICES,
    MAX_HEAD_DIM,
    experts_of,
    in_groups,
    model_of,
)
from twostroke.models.families.hybrid_layers import kv_heads
from twostroke.models.families.mamba2 import MAMBA2_GGUF, MAMBA2_GGUF_KEYS, Mamba2Family, mamba2_of, mamba2_parts
from twostroke.models.feed_forward import UNGATED
from twostroke.models.rope import NO_ROPE
from twostroke.models.tensor_shapes import ROUTER, SELECTION_BIAS

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
KINDS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS, "mamba": MAMBA, "attention": ATTENTION} | {
    kind: kind for kind in (MAMBA, ATTENTION, MLP, EXPERTS)
}
FEED_FORWARD = ("mlp_norm", "up", "down", "experts", "shared", ROUTER, SELECTION_BIAS)
NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
NAMES_OF_EXPERTS = {f"experts.{part}": f"mixer.experts.{{}}.{part}_proj.weight" for part in ("up", "down")}


class NemotronH(Mamba2Family):
    name = gguf = "nemotron_h"
    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    transformers = "NemotronHForCausalLM"
    inner = MLP  # what is not a mixer, in GGUF files
    huggingface_outer: ClassVar = {"embed": "embeddings.weight", "norm": "norm_f.weight"}
    huggingface_parts: ClassVar = (
        {ours: theirs.replace("self_attn.", "mixer.") for ours, theirs in HUGGINGFACE_PARTS.items()}
        | dict.fromkeys(("attn_norm", "mlp_norm"), "norm.weight")
        | {part: f"mixer.{part}_proj.weight" for part in ("up", "down")}
        | {f"shared.{part}": f"mixer.shared_experts.{part}_proj.weight" for part in ("up", "down")}
        | {ROUTER: "mixer.gate.weight", SELECTION_BIAS: "mixer.gate.e_score_correction_bias"}
        | NAMES_OF_EXPERTS
        | mamba2_parts("mixer")
    )
    gguf_keys: ClassVar = {
        **GGUF_EXPERT_KEYS,
        **{NAMES.get(ours, ours): theirs for ours, theirs in MAMBA2_GGUF_KEYS.items()},
        "n_shared_experts": "expert_shared_count",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    }
    gguf_defaults: ClassVar = {"mlp_hidden_act": "relu2", "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    gguf_parts: ClassVar = (
        GGUF_PARTS
        | {"mlp_norm": "attn_norm.weight", SELECTION_BIAS: "exp_probs_b.bias"}
        | GGUF_EXPERT_PARTS
        | GGUF_SHARED_PARTS
        | MAMBA2_GGUF
    )

    def describe(self, source: ConfigSource) -> ModelConfig:
        if not source.biases.isdisjoint(MATRICES) or source.get("use_bias") or source.get("mlp_hidden_act") != "relu2":
            raise source.unsupported("biases of matrices, or an activation that is not relu2")
        if source.get("moe_latent_size") is not None:
            raise source.unsupported("experts between projections of their own (moe_latent_size)")
        kinds = self._kinds(source)
        if ATTENTION not in kinds or MAMBA not in kinds:
            raise source.unsupported("no layer of attention, or none of Mamba-2")
        attention, inner = self._attention(source), None
        if source.format == "huggingface":
            inner = source.integer("mamba_num_heads") * source.integer("mamba_head_dim")
        mamba, layers = mamba2_of(source, NAMES, inner), list[Layer]()
        for index, kind in enumerate(kinds):
            if kind in (MAMBA, ATTENTION):
                layers.append(Layer(mamba if kind == MAMBA else attention, GatedMLP(0, UNGATED)))
            elif not layers or layers[-1].feed_forward.intermediate_size:
                raise source.unsupported("an MLP that is first, or behind another")
            else:
                layers[-1] = replace(layers[-1], feed_forward=self._feed_forward(source, kind, index))
        eps = source.number("rms_norm_eps" if source.format == "gguf" else "layer_norm_epsilon")
        return model_of(source, self, layers, norm_eps=eps)

    def _attention(self, source: ConfigSource) -> Attention:
        key = "head_dim" if source.get("attention_head_dim") is None else "attention_head_dim"
        heads, dim = source.integer("num_attention_heads"), source.integer(key, limit=MAX_HEAD_DIM)
        shared = kv_heads(source) or source.integer("num_key_value_heads")
        if heads % shared or dim % 2:
            raise source.wrong("num_attention_heads", f"a multiple of {shared} KV heads, of an even size")
        return Attention(heads, shared, dim, dim**-0.5, NO_ROPE)

    def _kinds(self, source: ConfigSource) -> list[str]:
        """The kind of each layer of the file."""
        if source.format == "gguf":
            heads, sizes = source.get("num_key_value_heads"), source.get("intermediate_size")
            counts = range(source.num_layers)
            lists = isinstance(heads, list) and isinstance(sizes, list)
            if not lists or min(len(heads), len(sizes)) < source.num_layers:
                raise source.wrong("num_key_value_heads", "a list, and the sizes of MLPs another, one for each layer")
            return [ATTENTION if heads[i] else self.inner if sizes[i] else MAMBA for i in counts]
        given = source.get("hybrid_override_pattern") or source.get("layers_block_type")
        if not isinstance(given, str | list) or not all(isinstance(kind, str) and kind in KINDS for kind in given):
            raise source.unsupported(f"layers_block_type other than {', '.join(KINDS)}")
        if len(given) > source.num_matrices:  # a layer has one at least
            raise source.bad("layers_block_type", f"at most {source.num_matrices}, as the files have", len(given))
        return [KINDS[kind] for kind in given]

    def _feed_forward(self, source: ConfigSource, kind: str, index: int) -> GatedMLP | Experts:
        if kind == MLP:
            sizes = source.get("intermediate_size")
            size = sizes[index] if isinstance(sizes, list) else sizes
            if type(size) is not int or not 0 < size < MAX_COUNT:
                raise source.wrong("intermediate_size", "positive integers")
            return GatedMLP(size, UNGATED)
        found = experts_of(source, "moe_intermediate_size", bool(source.get("norm_topk_prob")))
        if source.get("n_shared_experts") not in (0, 1):
            raise source.unsupported("several shared experts")
        found = replace(
            found,
            activation=UNGATED,
            shared_size=source.get("n_shared_experts") and source.integer("moe_shared_expert_intermediate_size"),
            shared_gated=False,
            sigmoid=True,
            selection_bias=True,
            scale=source.number("routed_scaling_factor"),
        )
        return in_groups(source, found, sigmoid=True)

    def stored_layer(self, config: ModelConfig, layer: int, part: str) -> int:
        before = sum(1 + bool(one.feed_forward.intermediate_size) for one in config.layers[:layer])
        return before + (part in FEED_FORWARD)


class NemotronHMoE(NemotronH):
    """Files with experts have another name in GGUF alone."""

    name = gguf = "nemotron_h_moe"
    model_types = ()
    inner = EXPERTS
