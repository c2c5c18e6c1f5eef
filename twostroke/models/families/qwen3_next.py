"""Qwen3-Next: Qwen3.5's layers of two kinds before it, with experts, and with other matrices in its files (2025)."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from twostroke.models.config import Experts, GatedMLP, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.qwen3_5_moe import Qwen3_5MoE
from twostroke.models.recurrent import GatedDeltaNet, RecurrentMixer


class Qwen3Next(Qwen3_5MoE):
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

    def feed_forward(self, source: ConfigSource) -> GatedMLP | Experts:
        if source.get("mlp_only_layers") or source.get("decoder_sparse_step") != 1 or not source.get("norm_topk_prob"):
            raise source.unsupported("layers without experts, or weights that are not divided by their sum")
        return super().feed_forward(source)

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


def _by_part(state: RecurrentMixer, sizes: list[int]) -> np.ndarray:
    """Where the rows of parts, all heads of each, are in a matrix with parts of these sizes for each head of k."""
    rows = np.arange(state.num_k_heads * sum(sizes)).reshape(state.num_k_heads, -1)
    return np.concatenate([part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], 1)])
