"""Attention weights of a value's last entries, computed from their queries.

Kernels never materialize attention weights: they use an online softmax. A stroke can return queries instead, and the
weights of a few rows are computed from them here, with the same order and masks as in the kernels.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from twostroke.kv.cache import KVCache


@dataclass(frozen=True)
class Queries:
    """Query vectors of the last n entries of a value."""

    # [layers, n, Hq, D] float32 of the layers with attention, after RoPE and multiplied by the attention scale; zeros
    # follow the numbers of smaller heads
    rows: np.ndarray
    windows: tuple[int | None, ...]  # each of these layers' sliding window in positions, or None
    cap: float | None = None  # the bound of scores, if the model has one (`ModelConfig.score_cap`)
    sources: Sequence[int] = ()  # the layer whose keys each layer reads; empty if each reads its own

    def __len__(self) -> int:
        return self.rows.shape[1]

    def without_last(self, count: int) -> "Queries":
        """The queries without those of the last `count` entries."""
        return replace(self, rows=self.rows[:, : max(0, len(self) - count)])


NO_QUERIES = Queries(np.empty((0, 0, 0, 0), np.float32), ())


def attention_weights(kv: KVCache, queries: Queries) -> Iterator[np.ndarray]:
    """Yield, per layer, the attention weights of the last n entries: [Hq, n, len(kv)] float32; rows sum to 1.

    What goes to a sink logit (`Attention.sink_logits`) is left out: weights are shares among entries.
    """
    for layer in range(len(queries.windows)):
        yield softmax(attention_scores(kv, queries, layer))


def attention_scores(kv: KVCache, queries: Queries, layer: int) -> np.ndarray:
    """Scores q k of the last n entries in the i-th layer of the queries: [Hq, n, len(kv)] float32.

    -inf where a row does not see an entry.
    """
    q, window, n = queries.rows[layer], queries.windows[layer], len(queries)
    positions, order = np.array(kv.positions), np.arange(len(kv))
    own, own_order = positions[len(kv) - n :, None], order[len(kv) - n :, None]
    keys = (
        kv.keys(queries.sources[layer] if queries.sources else layer).astype(np.float32).transpose(1, 2, 0)
    )  # [Hkv, D, len]
    # Query heads that share a KV head are adjacent: [Hkv, Hq / Hkv * n, D].
    shared = q[..., : keys.shape[1]].swapaxes(0, 1).reshape(len(keys), -1, keys.shape[1])
    with one_thread():
        scores = (shared @ keys).reshape(-1, n, len(kv))
    if queries.cap is not None:
        scores = queries.cap * np.tanh(scores / np.float32(queries.cap))
    if kv.entry_table.bias is not None:
        source = queries.sources[layer] if queries.sources else layer
        bias = kv.entry_table.bias[:, kv.pool.geometry.kv_layers.index(source)].T
        bias = np.repeat(bias, len(scores) // len(bias), 0)[:, None]
        scores = np.where(np.isneginf(bias), bias, scores + bias)  # what is hidden may have no key
    hidden = order > own_order
    if window is not None:
        hidden = hidden | (positions <= own - window)
    np.copyto(scores, -np.inf, where=hidden)
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis, in place."""
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores


def one_thread() -> AbstractContextManager[Any]:
    """Matrix products of numpy in this thread alone: idle BLAS threads would spin on the cores that the kernels use."""
    return _blas().limit(limits=1)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def attention_by_head(kv: KVCache, queries: Queries) -> np.ndarray:
    """Attention that each entry receives in each KV head from the last n entries: mean over its query heads and the n.

    Returns:
        [layers with K and V of their own, KV heads, len(kv)] float64. All layers have as many heads.
    """
    layers, heads = kv.pool.geometry.kv_layers, kv.pool.geometry.kv_heads
    mass = np.zeros((len(layers), heads or 0, len(kv)))
    for layer, weights in zip(queries.sources or layers, attention_weights(kv, queries), strict=True):
        mass[layers.index(layer)] += weights.reshape(heads or 0, -1, len(kv)).mean(1)
    return mass


def attention_mass(kv: KVCache, queries: Queries) -> np.ndarray:
    """Attention that each entry receives from the last n entries: mean over layers and heads, summed over the n.

    Returns:
        [len(kv)] float64 with sum n; zeros without queries.
    """
    mass = np.zeros(len(kv))
    for weights in attention_weights(kv, queries) if len(queries) else ():
        mass += weights.mean(0).sum(0) / len(queries.windows)
    return mass
