"""R-KV: while it decodes, entries stay that the last tokens attend to and that no other entry repeats.

Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (arXiv:2505.24133), section 3: worth
is a mix of importance (attention of the last tokens to those before, of query heads the strongest, spread to
neighbours) and redundancy (the mean cosine of an entry's K to all others). The last entry that is like another counts
as no repetition of it, so that one of several stays. The prompt, too, is reduced before decoding begins.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled, Program
from twostroke.fields import integer, number
from twostroke.kv.attention import Queries, attention_scores, one_thread, softmax
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import MAX_OBSERVED, best, keys_by_head
from twostroke.methods.method import Method, Prompt

COLUMNS = 128  # entries that are searched at once for the last one of their kind


@dataclass(frozen=True)
class RKV(Method, name="rkv"):
    """Decode with a bounded number of entries for each head, those that are important and not redundant."""

    goes_on = True

    budget: int = integer(256, least=2)  # how many entries stay; the window is among them
    every: int = integer(128, least=2)  # tokens between reductions; up to this many entries more are held
    window: int = integer(8, least=1, most=MAX_OBSERVED)  # how many of the last entries say what is important, and stay
    # the part of importance in an entry's worth; the rest is that of redundancy
    importance: float = number(0.1, least=0, most=1)
    similar: float = number(0.5, least=-1, most=1)  # the cosine above which one entry is like another
    kernel: int = integer(7, least=1, most=255)  # over how many neighbours importance spreads; odd

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("budget", self.budget > self.window, f"an integer of at least {self.window + 1} (window + 1)")
        self.require("every", self.every > self.window, f"an integer of at least {self.window + 1} (window + 1)")
        self.require("kernel", self.kernel % 2 == 1, "odd")

    @property
    def by_head(self) -> bool:
        return True

    def program(self, prompt: Prompt) -> Program:
        made: Prefilled = yield Prefill(prompt, queries=self.window)
        kv, queries = made.kv, made.queries
        del made  # it would keep the pages of dropped entries
        while True:
            kv = self.staying(kv, queries)
            run: Decoded = yield Decode(kv, max_tokens=self.every, queries=self.window)
            if run.finish_reason is not None:
                return
            kv, queries = run.kv, run.queries
            del run

    def staying(self, kv: KVCache, queries: Queries) -> KVCache:
        """The entries that stay."""
        if len(kv) <= self.budget:
            return kv
        worth = np.stack([self.worth(kv, queries, layer, keys) for layer, keys in enumerate(keys_by_head(kv))])
        worth[..., -self.window :] = np.inf
        return kv.gather(best(worth, self.budget))

    def worth(self, kv: KVCache, queries: Queries, layer: int, keys: np.ndarray) -> np.ndarray:
        """That of a layer's entries, from their keys, [KV heads, n, D]: [KV heads, n]."""
        scores = attention_scores(kv, queries, layer).reshape(len(keys), -1, len(queries), len(kv))
        past = softmax(scores.max(1)[..., : -self.window]).mean(1)
        near = np.pad(past, ((0, 0), (self.kernel // 2, self.kernel // 2)))
        seen = np.lib.stride_tricks.sliding_window_view(near, self.kernel, -1).max(-1)
        important = np.pad(seen, ((0, 0), (0, self.window)))
        return self.importance * important - (1 - self.importance) * redundant(keys, self.similar)


def redundant(keys: np.ndarray, similar: float) -> np.ndarray:
    """The share of each key, [KV heads, n, D], in its head's repetition, [KV heads, n]: softmax of mean cosines."""
    count = keys.shape[1]
    units = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), np.float32(1e-8))
    sums = (units * units.sum(1, keepdims=True)).sum(-1) - (units**2).sum(-1)
    for head, own in enumerate(units):
        rows = np.arange(count)  # whose last similar entry is not found yet
        for stop in range(count, 0, -COLUMNS):
            columns = np.arange(max(0, stop - COLUMNS), stop)
            with one_thread():
                cosines = own[rows] @ own[columns].T
            cosines[rows[:, None] == columns] = -np.inf
            alike = cosines[:, ::-1] > similar
            found, last = alike.any(1), len(columns) - 1 - alike.argmax(1)
            np.subtract.at(sums[head], columns[last[found]], cosines[found, last[found]])
            rows = rows[~found]
    return softmax(sums / np.float32(count))
