"""Expected Attention: the entries stay to which queries like the prompt's would attend most from positions to come.

Devoto, Jeblick and Jégou 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution" (arXiv:2510.00636), section 3: queries before RoPE are taken as Gaussian, with the mean and covariance of
the prompt's, and turned by the mean rotation of the next `future` positions. The mean of exp(q k) has a closed form.
As in kvpress, its share is multiplied with the norm of V; the paper projects V by the layer's output matrix first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.fields import flag, integer, number
from twostroke.kv.attention import Queries, one_thread, softmax
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import Choice, RankedByHead, watched
from twostroke.methods.method import Prompt
from twostroke.models.rope import Rope, mean_turned_back, turned_on


@dataclass(frozen=True)
class ExpectedAttention(RankedByHead, name="expected-attention"):
    """Decode from the entries of greatest expected attention times the norm of V."""

    # besides, how many of the first queries are left out of the mean and the covariance
    sinks: int = integer(4, least=0)
    # over how many positions behind the prompt rotations are averaged
    future: int = integer(512, least=1, most=1 << 16)
    epsilon: float = number(0.0, least=0)  # what is added to an entry's share of attention before it is multiplied
    norms: bool = flag(True)  # whether it is multiplied with the norm of V at all

    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        moments = Moments(self.sinks)
        kv = yield from watched(tokens, moments.add)
        ahead = kv.next_position + np.arange(self.future)
        ropes = (kv.pool.geometry.rope_of(layer) for layer in kv.pool.geometry.kv_layers)
        layers = zip(kv.entries(), ropes, moments.by_layer(), strict=True)
        return kv, np.stack([self.expected(entries, rope, ahead, *of) for entries, rope, of in layers])

    def expected(
        self, entries: np.ndarray, rope: Rope, ahead: np.ndarray, mean: np.ndarray, covariance: np.ndarray
    ) -> np.ndarray:
        """The worth of a layer's entries, [2, n, KV heads, D], to queries at the positions `ahead`: [KV heads, n]."""
        keys, values = entries[:, self.sinks :].swapaxes(1, 2).astype(np.float32)
        heads, _, dim = keys.shape
        # A query turned by a rotation, times a key, is the query times the key turned back.
        keys = mean_turned_back(rope, keys, ahead)[:, None]
        with one_thread():
            scores = keys @ mean.reshape(heads, -1, dim, 1)
            scores += ((keys @ covariance.reshape(heads, -1, dim, dim)) * keys).sum(-1, keepdims=True) / 2
        shares = softmax(scores[..., 0]).mean(1)
        worth = shares + np.float32(self.epsilon)
        if self.norms:
            worth = worth * np.linalg.norm(values, axis=-1)
        return np.pad(worth, ((0, 0), (self.sinks, 0)))


class Moments:
    """Mean and covariance of queries before RoPE, from parts of a prompt as they come."""

    def __init__(self, skipped: int) -> None:
        """The first `skipped` entries' queries are left out."""
        self._left, self._count = skipped, 0
        self._sums, self._products = np.zeros(()), np.zeros(())

    def add(self, kv: KVCache, queries: Queries) -> None:
        """Add the queries of the last entries of a value."""
        rows = before_rope(kv, queries)[:, :, self._left :].astype(float)
        self._left = max(0, self._left - len(queries))
        with one_thread():
            self._products = self._products + rows.swapaxes(2, 3) @ rows
        self._sums, self._count = self._sums + rows.sum(2), self._count + rows.shape[2]

    def by_layer(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each layer's means, [Hq, D], and its covariances, [Hq, D, D], float32."""
        for sums, products in zip(self._sums, self._products, strict=True):
            mean = sums / self._count
            covariance = products / self._count - mean[:, :, None] * mean[:, None]
            yield mean.astype(np.float32), covariance.astype(np.float32)


def before_rope(kv: KVCache, queries: Queries) -> np.ndarray:
    """The queries of the last n entries as they were before RoPE, [layers, Hq, n, D] float32."""
    positions, geometry = np.array(kv.positions[len(kv) - len(queries) :])[:, None], kv.pool.geometry
    turned = (
        turned_on(geometry.rope_of(layer), rows, positions, -positions)
        for layer, rows in zip(geometry.kv_layers, queries.rows, strict=True)
    )
    return np.stack([one.swapaxes(0, 1) for one in turned])
