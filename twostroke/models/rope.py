"""Rotary position embedding, as a model asks for it."""

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Rope:
    """RoPE (Su et al. 2021): pair i of a head turns by position * base**(-2i / head_dim) / factors[i].

    `factors` (length head_dim / 2) holds what Llama 3 or linear scaling makes of each frequency; None is all ones.
    Pairs are (i, i + head_dim / 2), the layout of Hugging Face checkpoints; loaders permute the others.
    """

    base: float
    factors: tuple[float, ...] | None = None


@cache
def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32: what each pair turns by per position."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    turns = np.float32(1.0) / np.float32(rope.base) ** exponents
    return turns if rope.factors is None else turns / np.array(rope.factors, np.float32)
