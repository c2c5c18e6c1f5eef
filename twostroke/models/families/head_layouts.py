"""The order of numbers in a head: checkpoints have others than ours, in which pair i of RoPE is (i, i + head_dim / 2).

Scores of attention stay the same if the numbers of q and k are permuted alike, so loaders permute rows of both.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from twostroke.models.config import Attention, ModelConfig
from twostroke.models.families.family import Transform
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import tensor_shapes

# Of the rotated numbers, which come first: pair i is (i, i + rotated / 2), or (2 i, 2 i + 1).
Layout = Literal["halves", "pairs"]


def to_our_layout(config: ModelConfig, layout: Layout) -> dict[str, Transform]:
    """Conversions, by Twostroke name, of what has an order of numbers in heads."""
    found: dict[str, Transform] = {}
    shapes = tensor_shapes(config)
    for i, attention in config.attention_layers.items():
        order = _order(attention, layout)
        if (order == np.arange(len(order))).all():
            continue
        names = (f"layers.{i}.{part}{what}" for part in "qk" for what in ("", "_bias", "_norm"))
        found |= dict.fromkeys((name for name in names if name in shapes), permuted(order))
    return found


def _order(attention: Attention, layout: Layout) -> np.ndarray:
    """[head_dim]: where the numbers of our heads are in the checkpoint's."""
    # Without RoPE there are no pairs; converters to "pairs" permute such layers too.
    rotated = attention.rope.rotated or attention.head_dim
    turned, rest = np.arange(rotated), np.arange(rotated, attention.head_dim)
    first, second = turned.reshape(2, -1) if layout == "halves" else turned.reshape(-1, 2).T
    half = len(rest) // 2
    return np.concatenate([first, rest[:half], second, rest[half:]])


def permuted(order: np.ndarray) -> Callable[[RawTensor], RawTensor]:
    """Puts the numbers of every head in this order."""

    def permute(tensor: RawTensor) -> RawTensor:
        heads = np.arange(0, tensor.shape[0], len(order))[:, None]
        return tensor.permute_rows((heads + order).reshape(-1))

    return permute
