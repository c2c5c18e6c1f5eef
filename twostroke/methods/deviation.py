"""How far entries that were read alone are from those of the whole prompt, and the tokens where they deviate most.

Yao et al. 2024, "CacheBlend" (arXiv:2405.16444), section 4: tokens whose KV deviates most in one layer are those in the
next ones too, so the first layers choose what is computed again. As in the authors' code, all tokens pass the first two
layers (the model's own, as a companion: `--draft first-layers`), V of the second one is compared, and the share that
deviates most, of all passages together, is computed again in all layers. What differs here:

- The choice of the second layer stays for all; the paper computes a few more there and narrows them layer by layer.
- The chosen tokens pass the first two layers again.
- They see those of their own passage between them as they were alone, and those of passages before as they are joined.
  In the paper they see each other at every layer.
- Each stretch of them has pages of its own, so a value of scattered ones takes more memory than a plain one.
"""

import numpy as np

from twostroke.kv.cache import KVCache


def distances(made: KVCache, own: KVCache, layer: int) -> np.ndarray:
    """The squared distance of V of each token in a layer, [n] float64; 0 where a window has given an entry back."""
    return np.nan_to_num(((_values(made, layer) - _values(own, layer)) ** 2).sum(1))


def relative_distances(made: KVCache, own: KVCache) -> np.ndarray:
    """The distance of V in the last layer by its length, [m] float64, of tokens whose entries there are known."""
    layer = made.pool.geometry.kv_layers[-1]
    gap, length = (np.sqrt(one) for one in (distances(made, own, layer), (_values(made, layer) ** 2).sum(1)))
    known = np.isfinite(length) & (length > 0)
    return gap[known] / length[known]


def largest(values: np.ndarray, share: float) -> np.ndarray:
    """Which of n values are the largest `share` of them, [n] bool; of equal ones the first."""
    chosen = np.zeros(len(values), np.bool_)
    chosen[np.argsort(-values, kind="stable")[: round(share * len(values))]] = True
    return chosen


def stretches(marks: np.ndarray) -> list[tuple[int, int]]:
    """The stretches of marked places, each from its first place to behind its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _values(kv: KVCache, layer: int) -> np.ndarray:
    return kv.entries(layer)[1].astype(np.float64).reshape(len(kv), -1)
