"""Attention matching: fewer entries, fitted so that attention to them is what attention to all of them was.

Zweiger, Fu, Guo and Kim 2026, "Fast KV Compaction via Attention Matching" (arXiv:2602.16284): of each head, keys that
queries attend to most; a bias for each, so that their mass is that of all; and values by least squares, so that the
results are. Here the queries are those of the prompt's last tokens, where the paper also lets the model repeat the
prompt. An entry counts at least as itself, and what it counts beyond that is fitted to the mass of dropped entries by
multiplicative steps (Lee and Seung 2001): free weights were 0 for most entries, and an answer of several tokens then
broke off behind the first (docs/results/dropping.md). Values stay near what they were as far as queries say nothing
(ridge), since there may be fewer queries than entries.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program
from twostroke.fields import integer, number
from twostroke.kv.attention import Queries, attention_by_head, attention_scores
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import MAX_OBSERVED, ByHead, best
from twostroke.methods.made_entries import Head, made_entries
from twostroke.methods.method import Prompt

MASS_STEPS = 100
MIN_SHARE = 1e-9  # of the mass, below which no query says anything of an entry


@dataclass(frozen=True)
class AttentionMatching(ByHead, name="attention-matching"):
    """Decode from fewer entries with fitted biases and values."""

    sinks: int = integer(4, least=0)
    # how many of the prompt's last tokens give the queries
    queries: int = integer(MAX_OBSERVED, least=1, most=MAX_OBSERVED)
    # how much a value resists its change, as a share of the mean square of weights
    ridge: float = number(0.01, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("budgets", self.budgets == "equal", "'equal': fitted entries are as many in each head")

    @property
    def observed(self) -> int:
        return self.queries

    @property
    def biased(self) -> bool:
        return True

    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        return attention_by_head(kv, queries)

    @property
    def makes_entries(self) -> bool:
        return True

    def program(self, prompt: Prompt) -> Program:
        tokens, kept = self.copies(prompt)
        made: Prefilled = yield Prefill(tokens, queries=self.observed)
        count = self.count_of(len(kept))
        kv = self.cut(made.kv, kept) if count >= len(kept) else self.fitted(made, kept, count)
        del made  # it would keep the pages of all entries
        yield Decode(kv)

    def fitted(self, made: Prefilled, kept: np.ndarray, count: int) -> KVCache:
        """A value of `count` entries for each head, for those of the indices `kept`."""
        kv = made.kv
        worth = self.above_all(self.scores(kv, made.queries)[..., kept], count)
        scores = lru_cache(1)(lambda layer: attention_scores(kv, made.queries, layer)[..., kept])

        def of_head(layer: int, head: int, keys: np.ndarray, values: np.ndarray, some: np.ndarray) -> Head:
            of_queries = scores(layer).reshape(worth.shape[1], -1, len(kept))[head]
            return keys[some], *fit(of_queries.astype(np.float64), values, some, self.ridge)

        value = made_entries(kv, kept, best(worth, count), of_head)
        return value.resumed_at(kv.next_position if self.offset == "right" else count)


def fit(scores: np.ndarray, values: np.ndarray, some: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Values and biases of the entries `some`, [m] indices, with which attention is as to all.

    Args:
        scores: [queries, n] float64, -inf where a query does not see an entry.
        values: [n, head_dim].

    Returns:
        ([m, head_dim], [m]): of an entry of which no query says anything, its own value, and 0. Biases are 0 or more.
    """
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    seen = shares[:, some]
    squares, wanted = seen.T @ seen, seen.T @ (1 - seen.sum(-1))  # of the mass that is dropped
    more = (wanted > MIN_SHARE).astype(float)
    for _ in range(MASS_STEPS):
        more *= wanted / np.maximum(squares @ more, MIN_SHARE)
    weights = 1 + more
    mixed = seen * weights
    mixed /= np.maximum(mixed.sum(-1, keepdims=True), MIN_SHARE)
    own = values[some].astype(np.float64)
    gram = mixed @ mixed.T
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    return own + mixed.T @ np.linalg.solve(gram, shares @ values - mixed @ own), np.log(weights)
