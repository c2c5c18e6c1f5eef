"""LagKV: an entry stays if its K and V stand out from the range of those in the next part of the prompt.

Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important"
(arXiv:2504.04704). Behind the sinks the prompt is in parts of `lag` entries. Each part but the last whole
one keeps the same share, and what follows stays. If the budget does not come out even, earlier parts keep one more.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.fields import integer
from twostroke.kv.attention import Queries, softmax
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import ByHead


@dataclass(frozen=True)
class LagKV(ByHead, name="lagkv"):
    """Decode from the entries that stand out from the part behind theirs; of short prompts from the newest."""

    sinks: int = integer(4, least=0)
    lag: int = integer(128, least=2)  # how many entries a part has

    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        return np.stack([self.ranks(one.astype(np.float32)) for one in kv.entries()])

    def ranks(self, entries: np.ndarray) -> np.ndarray:
        """The worth of a layer's entries, [2, n, KV heads, head_dim], by their rank in their part: [KV heads, n]."""
        _, length, heads, dim = entries.shape
        parts = (length - self.sinks) // self.lag
        worth = np.tile(np.arange(length, dtype=float) / length + 1, (heads, 1))  # the newest
        if parts < 2:
            return worth
        found = entries[:, self.sinks :][:, : parts * self.lag].transpose(0, 2, 1, 3)
        found = standing_out(found.reshape(2, heads, parts, self.lag, dim)).mean(0)
        ranks = found.argsort(-1, kind="stable").argsort(-1) / self.lag
        worth[:, self.sinks : self.sinks + (parts - 1) * self.lag] = ranks.reshape(heads, -1)
        return worth


def standing_out(entries: np.ndarray) -> np.ndarray:
    """How far entries in parts, [..., parts, lag, head_dim], stand out from the next part: [..., parts - 1, lag]."""
    least, most = entries.min(-2, keepdims=True), entries.max(-2, keepdims=True)
    room = np.where(most > least, most - least, np.float32(1))
    return softmax(((entries[..., :-1, :, :] - least[..., 1:, :, :]) / room[..., 1:, :, :]).std(-1, ddof=1))
