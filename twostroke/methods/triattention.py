"""TriAttention: the entries stay to which a head's mean query would attend from positions to come.

Mao et al. 2026, "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression" (arXiv:2604.04921): before
RoPE, queries of a head lie near one center. So the score of a key follows from its distance: the sum over pairs f of
|E q_f| |k_f| cos(w_f distance + phase), a trigonometric series, which is the mean over distances 1, 2, 4 and so on up
to `future`. Where queries scatter, norms say more: (E |q_f| - |E q_f|) |k_f| is added. The paper measures centers on
other texts, once for a model; here they are the prompt's own, so nothing is calibrated. Of query heads that share a KV
head each one's scores are standardized and the greatest counts. As in the paper the choice is made again each `every`
tokens, and entries younger than that stay; here the prompt, too, is reduced, before decoding begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Decoded, Program
from twostroke.fields import integer
from twostroke.kv.attention import Queries, one_thread
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import Choice, RankedByHead, best, keys_by_head, watched
from twostroke.methods.expected_attention import before_rope
from twostroke.methods.method import Prompt
from twostroke.models.rope import mean_turned_back


@dataclass(frozen=True)
class TriAttention(RankedByHead, name="triattention"):
    """Decode from the entries that score best by the center of the prompt's queries, also of those decoded."""

    goes_on = True

    newest: int = integer(32, least=1)  # how many of the last entries stay at each reduction
    every: int = integer(128, least=1)  # tokens between reductions; up to this many entries more are held
    future: int = integer(1 << 16, least=1, most=1 << 20)  # the furthest of the positions to come

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("budgets", self.budgets == "equal", "equal")

    def program(self, prompt: Prompt) -> Program:
        tokens, kept = self.copies(prompt)
        centers = Centers()
        kv = yield from watched(tokens, centers.add)
        count = self.count_of(len(kept))
        kv = self.cut(kv, self.staying(kv, kept, centers, count))
        while True:
            run: Decoded = yield Decode(kv, max_tokens=self.every)
            if run.finish_reason is not None:
                return
            kv = run.kv
            del run  # it would keep the pages of dropped entries
            if len(kv) > count:
                kv = kv.gather(self.staying(kv, np.arange(len(kv)), centers, count))

    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        centers = Centers()
        kv = yield from watched(tokens, centers.add)
        return kv, centers.scores(kv, self.future)

    def staying(self, kv: KVCache, kept: np.ndarray, centers: "Centers", count: int) -> np.ndarray:
        """Which of the entries `kept` stay, rising: [layers, KV heads, count], or all of them, [n]."""
        if count >= len(kept):
            return kept
        return kept[best(self.above_all(centers.scores(kv, self.future)[..., kept], count), count)]


class Centers:
    """The mean of each head's queries before RoPE, and of the norms of their pairs, from parts of a prompt."""

    def __init__(self) -> None:
        self._sums, self._norms, self._count = np.zeros(()), np.zeros(()), 0

    def add(self, kv: KVCache, queries: Queries) -> None:
        """Add the queries of the last entries of a value."""
        rows = before_rope(kv, queries).astype(float)
        self._sums, self._count = self._sums + rows.sum(2), self._count + rows.shape[2]
        self._norms = self._norms + pair_norms(rows).sum(2)

    def scores(self, kv: KVCache, future: int) -> np.ndarray:
        """The worth of each entry of a value, [layers, KV heads, n] float32."""
        means = self._sums / self._count
        spread = self._norms / self._count - pair_norms(means)
        ahead = kv.next_position - 1 + 2 ** np.arange(future.bit_length())
        worth: list[np.ndarray] = []
        for index, keys in enumerate(keys_by_head(kv)):
            heads, _, dim = keys.shape
            # A query turned by a rotation, times a key, is the query times the key turned back.
            turned = mean_turned_back(kv.pool.geometry.rope_of(kv.pool.geometry.kv_layers[index]), keys, ahead)
            center = means[index].reshape(heads, -1, dim).swapaxes(1, 2).astype(np.float32)
            more = spread[index].reshape(heads, -1, dim // 2).swapaxes(1, 2).astype(np.float32)
            with one_thread():
                scores = turned @ center + pair_norms(keys) @ more  # [KV heads, n, query heads of each]
            scores -= scores.mean(1, keepdims=True)
            scores /= np.maximum(scores.std(1, keepdims=True), np.float32(1e-8))
            worth.append(scores.max(-1))
        return np.stack(worth)


def pair_norms(rows: np.ndarray) -> np.ndarray:
    """The lengths of the pairs that RoPE turns, of vectors [..., D]: [..., D / 2]."""
    return np.hypot(*np.split(rows, 2, -1))
