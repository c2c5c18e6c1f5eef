"""Which entries of a value its last ones attend to, found from their queries.

Kernels never hold attention weights: they walk the entries with an online softmax. A stroke may hand out queries, and
what is asked of few rows is computed again from them here, in the order and with the masks of the kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

from twostroke.kv.cache import KVCache


@dataclass(frozen=True)
class Queries:
    """Of the last n entries of a value.

    Attributes:
        rows: [layers, n, Hq, D] float32, turned by RoPE and times the attention scale.
        windows: each layer's sliding window, or None.
    """

    rows: np.ndarray
    windows: tuple[int | None, ...]

    def __len__(self) -> int:
        return self.rows.shape[1]

    def without_last(self, count: int) -> "Queries":
        """Those of the value without its last `count` entries."""
        return Queries(self.rows[:, : max(0, len(self) - count)], self.windows)


NO_QUERIES = Queries(np.empty((0, 0, 0, 0), np.float32), ())


def attention_weights(kv: KVCache, queries: Queries) -> Iterator[np.ndarray]:
    """Layer by layer, how the value's last n entries attend to all of it: [Hq, n, len(kv)] float32; rows sum to 1."""
    n = len(queries)
    positions, order = np.array(kv.positions), np.arange(len(kv))
    own, own_order = positions[len(kv) - n :, None], order[len(kv) - n :, None]
    for layer, (q, window) in enumerate(zip(queries.rows, queries.windows, strict=True)):
        keys = kv.keys(layer).astype(np.float32).transpose(1, 2, 0)  # [Hkv, D, len]
        # Query heads that share a KV head stand side by side: [Hkv, Hq / Hkv * n, D].
        shared = q.swapaxes(0, 1).reshape(len(keys), -1, q.shape[-1])
        with _blas().limit(limits=1):  # its threads would go on spinning, on the cores that kernels compute on
            weights = (shared @ keys).reshape(-1, n, len(kv))
        hidden = order > own_order
        if window is not None:
            hidden = hidden | (positions <= own - window)
        np.copyto(weights, -np.inf, where=hidden)
        weights -= weights.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        yield weights


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def attention_mass(kv: KVCache, queries: Queries) -> np.ndarray:
    """What each entry gets of the attention of the last n: the mean over layers and heads, summed up over the n.

    Returns:
        [len(kv)] float64, n in all; zeros without queries.
    """
    mass = np.zeros(len(kv))
    for weights in attention_weights(kv, queries) if len(queries) else ():
        mass += weights.mean(0).sum(0) / len(queries.windows)
    return mass
