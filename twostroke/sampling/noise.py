"""Drawing a token is a search for the largest, as taking the likeliest is (Gumbel 1954; Maddison et al. 2014, "A*
Sampling", section 2).

Of numbers x, each with noise of its own from Gumbel's distribution, the largest x + noise is that of id i with
probability softmax(x)[i]. So a draw is what arg-max makes of logits / temperature + noise, and whatever finds an
arg-max without all logits finds a draw without them. The noise of an id is a function of a key and the id, and the key
one of a seed and a token's index: with the same logits the same token is drawn, whatever else is computed. Similar
logits draw the same token mostly, which is what speculation with matched guesses lives on.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

COLDEST = 1e-7  # of temperatures: one below does what this does. Logits of 1e30 over it are still float32


@dataclass(frozen=True)
class Noise:
    """Of a row of logits.

    Attributes:
        gain: what logits are multiplied by, one over the temperature; 1 without noise.
        key: 64 bits; None for no noise, so that the likeliest token is found.
    """

    gain: float = 1.0
    key: int | None = None

    @classmethod
    def of(cls, temperature: float, seed: bytes, index: int) -> "Noise":
        """For the token with this index; none at temperature 0."""
        if temperature == 0:
            return NO_NOISE
        digest = hashlib.blake2b(index.to_bytes(8, "little"), key=seed, digest_size=8).digest()
        return cls(1 / max(temperature, COLDEST), int.from_bytes(digest, "little"))


NO_NOISE = Noise()


def gumbel(key: int, ids: np.ndarray) -> np.ndarray:
    """The noise of ids (int64), float64. native/noise.h has the same in single precision."""
    bits = _mixed(_mixed(ids.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)) ^ np.uint32(key >> 32))
    return -np.log(-np.log1p((bits + 0.5) * -(2.0**-32)))


def _mixed(x: np.ndarray) -> np.ndarray:
    """A permutation of 32 bits in which each depends on all (constants: hash-prospector, found by TheIronBorn)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))
