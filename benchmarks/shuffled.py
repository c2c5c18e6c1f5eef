"""The same model with its channels in another order, which leaves every product and every answer unchanged.

Weights that were quantized in groups of 32 lie on the grids of those groups, so quantizing them again costs nothing or
too little. After shuffling, each group has values of 32 old groups, which lie on no common grid, like weights that were
never quantized.
"""

from dataclasses import replace

import numpy as np

from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.config import Experts
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import ROUTER, SHARED_GATE

INNER = ("gate", "up", "gate_bias", "up_bias")  # of an MLP
VALUES = ("v", "v_bias", "q_gate")  # in the order of values in each head
# Tensors whose columns, and whose rows, are those of the residual stream.
OF_STATES = tuple(f"state_{part}" for part in "qkvzbacx")
FROM_RESIDUAL = ("embed", "head", "q", "k", "v", "q_gate", "gate", "up", "input_gate", "inputs.projection", *OF_STATES)
NORMS = ("input_norm", "norm", "attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")
TO_RESIDUAL = ("o", "o_bias", "down", "down_bias", "state_o", "input_projection", *NORMS)


def shuffled(checkpoint: Checkpoint, seed: int = 0) -> Checkpoint:
    """In float32. The residual stream is shuffled, the inside of each MLP, and within each head the values.

    Values that are keys too keep their order, as RoPE turns them, and so does the inside of recurrent layers.
    """
    config, random = checkpoint.config, np.random.default_rng(seed)
    hidden = random.permutation(config.hidden_size)
    mlps = [layer.feed_forward for layer in config.layers]
    sizes = {mlp.intermediate_size for mlp in mlps} | {mlp.shared_size for mlp in mlps if isinstance(mlp, Experts)}
    inner = {size: random.permutation(size) for size in sorted(sizes)}
    value = {size: random.permutation(size) for size in sorted({one.head_dim for one in config.attentions})}

    def attended(layer: int, rows: int) -> np.ndarray:
        """The order of a layer's values, or of what is made of them, in all heads."""
        one = config.attention_layers[layer]
        made = config.attention_layers[layer if one.source is None else one.source]
        order = np.arange(one.head_dim) if made.keys_as_values else value[one.head_dim]
        return (np.arange(0, rows, one.head_dim)[:, None] + order).reshape(-1)

    def reorder(name: str) -> RawTensor:
        tensor, part = checkpoint.tensor(name), name.split(".")[-1]
        x, part = tensor.dequantize(), name if name.startswith("inputs.") else part
        if part in VALUES:
            x = x[attended(int(name.split(".")[1]), len(x))]
        elif part in INNER or part in (*TO_RESIDUAL, SHARED_GATE):
            x = x[inner[len(x)] if part in INNER else hidden]
        if part == "o":
            x = x[:, attended(int(name.split(".")[1]), x.shape[1])]
        elif part in (*FROM_RESIDUAL, ROUTER) or part == "down":
            x = x[:, inner[x.shape[1]] if part == "down" else hidden]
        data = np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4 * x.shape[-1])
        return replace(tensor, format="F32", data=data)

    return replace(checkpoint, stored={name: reorder(name) for name in checkpoint.stored}, transforms={})
