"""Q-Filters: the entries stay whose keys lie in the direction of the queries.

Godey et al. 2025, "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression" (arXiv:2503.02812), section 3:
queries of a head have one main direction, the first right singular vector of many of them, with the sign that most of
them have. A key's product with it stands for the attention that later queries will give. The paper takes queries of
other texts, once for a model; here they are the prompt's own, so nothing is calibrated or fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.kv.attention import Queries, one_thread
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import Choice, RankedByHead, keys_by_head, watched
from twostroke.methods.method import Prompt


@dataclass(frozen=True)
class QFilters(RankedByHead, name="q-filters"):
    """Decode from the entries whose keys have the greatest product with the main direction of their queries."""

    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        directions = Directions()
        kv = yield from watched(tokens, directions.add)
        with one_thread():
            worth = [
                (keys @ one[:, :, None])[..., 0] for keys, one in zip(keys_by_head(kv), directions.found(), strict=True)
            ]
        return kv, np.stack(worth)


class Directions:
    """The main direction of the queries of each KV head, from parts of a prompt as they come."""

    def __init__(self) -> None:
        self._sums, self._products = np.zeros(()), np.zeros(())

    def add(self, kv: KVCache, queries: Queries) -> None:
        """Add the queries of the last entries of a value."""
        heads = kv.pool.geometry.kv_heads
        rows = np.stack([one.swapaxes(0, 1) for one in queries.rows]).astype(float)  # [layers, Hq, n, D]
        rows = rows.reshape(len(rows), heads or 1, -1, rows.shape[-1])
        with one_thread():
            self._products = self._products + rows.swapaxes(2, 3) @ rows
        self._sums = self._sums + rows.sum(2)

    def found(self) -> np.ndarray:
        """[layers, KV heads, D] float32, of length 1."""
        directions = np.linalg.eigh(self._products)[1][..., -1]
        signs = np.where((directions * self._sums).sum(-1, keepdims=True) < 0, -1, 1)
        return (directions * signs).astype(np.float32)
