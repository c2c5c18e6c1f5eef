"""Rotary position embedding (RoPE)."""

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Rope:
    """RoPE (Su et al. 2021): pair i of a head is rotated by position * base**(-2i / head_dim) / factors[i] radians.

    `factors` (length head_dim / 2) holds the divisors of Llama 3's or linear scaling; None is all ones. Pairs are
    (i, i + head_dim / 2), the layout of Hugging Face checkpoints; loaders permute other layouts.
    """

    base: float
    factors: tuple[float, ...] | None = None


@cache
def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32: each pair's angle per position, in radians."""

    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    turns = np.float32(1.0) / np.float32(rope.base) ** exponents
    return turns if rope.factors is None else turns / np.array(rope.factors, np.float32)
