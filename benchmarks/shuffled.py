"""The same model with its channels in another order, which leaves every product and every answer unchanged.

Weights that were quantized in groups of 32 lie on the grids of those groups, so quantizing them again costs nothing or
too little. After shuffling, each group has values of 32 old groups, which lie on no common grid, like weights that were
never quantized.
"""

from dataclasses import replace

import numpy as np

from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.config import ROUTER, SHARED_GATE, Experts
from twostroke.models.formats.tensor import RawTensor

INNER = ("gate", "up", "gate_bias", "up_bias")  # of an MLP


def shuffled(checkpoint: Checkpoint, seed: int = 0) -> Checkpoint:
    """In float32. The residual stream is shuffled, the inside of each MLP, and within each head the values."""
    config, random = checkpoint.config, np.random.default_rng(seed)
    hidden = random.permutation(config.hidden_size)
    mlps = [layer.feed_forward for layer in config.layers]
    sizes = {mlp.intermediate_size for mlp in mlps} | {mlp.shared_size for mlp in mlps if isinstance(mlp, Experts)}
    inner = {size: random.permutation(size) for size in sorted(sizes)}
    value, heads = random.permutation(config.head_dim), np.arange(config.num_heads)[:, None] * config.head_dim
    values, attended = (heads[: config.num_kv_heads] + value).reshape(-1), (heads + value).reshape(-1)
    rows = {"v": values, "v_bias": values, SHARED_GATE: hidden}
    rows |= dict.fromkeys(("o", "o_bias", "down", "down_bias"), hidden)
    rows |= dict.fromkeys(("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "norm"), hidden)
    columns = dict.fromkeys(("embed", "head", "q", "k", "v", "gate", "up", ROUTER), hidden) | {"o": attended}

    def reorder(name: str) -> RawTensor:
        tensor, part = checkpoint.tensor(name), name.split(".")[-1]
        x = tensor.dequantize()
        x = x[inner[len(x)] if part in INNER else rows.get(part, slice(None))]
        if part in columns or part == "down":
            x = x[:, inner[x.shape[1]] if part == "down" else columns[part]]
        data = np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4 * x.shape[-1])
        return replace(tensor, format="F32", data=data)

    return replace(checkpoint, stored={name: reorder(name) for name in checkpoint.stored}, transforms={})
