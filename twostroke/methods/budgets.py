"""How many entries each head keeps, where a technique's worth says which.

Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"
(arXiv:2407.11550), algorithm 1: a layer's entries are worth most in any of its heads. Cai et al. 2024, "PyramidKV:
Dynamic KV Cache Compression based on Pyramidal Information Funneling" (arXiv:2406.02069), section 3.2: lower layers
keep more, by equal steps.

A head's entries lie in as many slots as the head with most has, of which the others leave the first empty: so quality
and time of attention are those of the budgets, and memory that of the largest, or of each layer's (`kv_groups`).
"""

import numpy as np

from twostroke.kv.entries_by_head import NO_ENTRY

KINDS = ("equal", "ada", "pyramid")
PYRAMID = 20  # the last layer keeps a PYRAMID-th of the mean, as published (beta)


def budgets(kind: str, worth: np.ndarray, count: int, least: int, floor: float) -> np.ndarray:
    """How many entries each head keeps, [layers, KV heads], `count` on average, and at least `least`.

    Args:
        worth: [layers, KV heads, n]; in each head what must stay is infinite.
        floor: with "ada", the share of `count` that each head keeps in any case.
    """
    layers, heads, length = worth.shape
    if kind == "ada":
        return np.stack([_adaptive(own, count, max(least, int(floor * count))) for own in worth])
    if kind == "pyramid" and layers > 1:
        last = max(count // PYRAMID, least)
        first = min(2 * count - last, length)
        steps = np.linspace(first, max(2 * count - first, least), layers)
        return np.repeat(np.diff(np.rint(np.cumsum(steps)).astype(int), prepend=0)[:, None], heads, 1)
    return np.full((layers, heads), count)


def _adaptive(worth: np.ndarray, count: int, floor: int) -> np.ndarray:
    """The numbers of a layer's heads among its best entries, [KV heads], of which each head has `floor` in any case."""
    heads, length = worth.shape
    raised = worth.astype(np.float64)
    order = np.argsort(-raised, kind="stable", axis=-1)
    np.put_along_axis(raised, order[:, : min(floor, count)], np.inf, -1)
    chosen = np.argsort(-raised.ravel(), kind="stable")[: heads * count]
    return np.bincount(chosen // length, minlength=heads)


def best_by_head(worth: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The best of each head: indices as `KVCache.gather` takes them, [layers, KV heads, the largest count].

    The earlier of equals is taken first.

    Args:
        worth: [layers, KV heads, n]; counts: [layers, KV heads].
    """
    order = np.argsort(-worth, kind="stable", axis=-1)[..., : counts.max()]
    return np.sort(np.where(np.arange(order.shape[-1]) < counts[..., None], order, NO_ENTRY), axis=-1)
