"""Rotary position embedding, as a model asks for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """RoPE (Su et al. 2021): pair i of a head turns by position * base**(-2i / head_dim) / factors[i].

    `factors` (length head_dim / 2) holds what Llama 3 or linear scaling makes of each frequency; None is all ones.
    Pairs are (i, i + head_dim / 2), the layout of Hugging Face checkpoints; loaders permute the others.
    """

    base: float
    factors: tuple[float, ...] | None = None
