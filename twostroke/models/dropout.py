"""Dropout at inference, with masks that depend only on seed, block, position and column.

Srivastava et al. 2014, "Dropout". If dropout stays active after training, a model's passes are samples from an
approximate posterior: Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation" (arXiv:1506.02142).
"""

from dataclasses import MISSING, dataclass

import numpy as np

from twostroke.fields import Checked, Rule, declare, integer

GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Dropout(Checked):
    """Drops normalized inputs of a model's MLPs at random; the others are divided by 1 - probability.

    The mask is a hash of (seed, block, position, column), so batch, chunk, thread count and backend cannot change it.
    Raises InvalidRequest unless 0 <= probability < 1 and 0 <= seed < 2^63.
    """

    probability: float = declare(MISSING, Rule(float, least=0, below=1))
    seed: int = integer(0, least=0)

    @property
    def checked_as(self) -> str:
        return "dropout: "

    def factors(self, positions: np.ndarray, blocks: int, columns: int) -> np.ndarray:
        """Factors of inputs at `positions` [N]: [blocks, N, columns] float32, 0 or 1 / (1 - probability)."""
        hashed = np.array(self.seed, np.uint64)
        for counter in (np.arange(blocks), positions, np.arange(columns)):
            hashed = _mix(hashed[..., None] + (counter.astype(np.uint64) + 1) * GAMMA)
        uniform = (hashed >> 40).astype(np.float32) / (1 << 24)
        return np.where(uniform < self.probability, 0, 1 / (1 - self.probability)).astype(np.float32)


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014), modulo 2^64."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)
