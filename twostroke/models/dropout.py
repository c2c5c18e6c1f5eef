"""Dropout at inference, whose masks depend on nothing but what they are asked for.

Srivastava et al. 2014, "Dropout"; kept active after training, a model's passes are samples of what it might have
learnt: Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation" (arXiv:1506.02142).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass

import numpy as np

from twostroke.fields import Checked, Rule, declare, integer

GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Dropout(Checked):
    """Which of the normed inputs of a model's MLPs are dropped; those that stay are divided by 1 - probability.

    A mask is a hash of (seed, block, position, column), so batch, chunk, thread count and backend cannot change it.
    Raises InvalidRequest unless 0 <= probability < 1 and 0 <= seed < 2^63.
    """

    probability: float = declare(MISSING, Rule(float, least=0, below=1))
    seed: int = integer(0, least=0, most=(1 << 63) - 1)

    @property
    def checked_as(self) -> str:
        return "dropout: "

    def factors(self, positions: np.ndarray, blocks: int, columns: int) -> np.ndarray:
        """What inputs are multiplied by: [blocks, N, columns] float32, 0 or 1 / (1 - probability)."""
        hashed = np.array(self.seed, np.uint64)
        for counter in (np.arange(blocks), positions, np.arange(columns)):
            hashed = _mix(hashed[..., None] + (counter.astype(np.uint64) + 1) * GAMMA)
        uniform = (hashed >> 40).astype(np.float32) / (1 << 24)
        return np.where(uniform < self.probability, 0, 1 / (1 - self.probability)).astype(np.float32)


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014), which wraps around as it should."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)
