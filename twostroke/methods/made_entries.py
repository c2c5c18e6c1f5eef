"""A value whose entries a technique made: for each head other keys and values, and what they count for."""

from collections.abc import Callable

import numpy as np

from twostroke.kv.cache import KVCache

Head = tuple[np.ndarray, np.ndarray, np.ndarray]  # keys and values [m, head_dim], and biases [m]
MakeHead = Callable[[int, int, np.ndarray, np.ndarray, np.ndarray], Head]


def made_entries(kv: KVCache, kept: np.ndarray, stays: np.ndarray, make: MakeHead) -> KVCache:
    """As many entries for each head, at the places of some of those there are.

    Args:
        kept: [n] rising indices of the entries of `kv` from which they are made.
        stays: [layers, KV heads, m] rising indices in `kept`: whose places and tokens the new entries have.
        make: (layer, head, keys [n, head_dim], values [n, head_dim], stays [m]) -> the head's new entries.
    """
    keys = np.empty((*stays.shape, kv.pool.geometry.groups[0].head_dim), np.float32)
    values, bias = np.empty_like(keys), np.zeros(stays.shape, np.float32)
    for layer, whole in enumerate(kv.entries()):
        k, v = whole[:, kept].astype(np.float32).swapaxes(1, 2)  # [KV heads, n, head_dim]
        for head, some in enumerate(stays[layer]):
            keys[layer, head], values[layer, head], bias[layer, head] = make(layer, head, k[head], v[head], some)
    places = np.array(kv.positions)[kept][stays]
    ids = kv.token_array[kept][stays[0, 0]].tolist()
    return KVCache.of_entries(kv, keys, values, places, ids, bias if bias.any() else None).with_tail(kv.tail)
