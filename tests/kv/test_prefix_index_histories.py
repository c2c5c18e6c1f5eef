"""Random histories of a prefix index, against a table of page prefixes.

Tokens are from a small alphabet and pages are short, so that prefixes often coincide. K and V depend on the whole
history of an entry, so that the bits of a hit reveal any wrong entry.
"""

import gc
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kv.counts import check_counts
from tests.kv.values import contents, make_pool, prefill
from tests.thinning import examples
from twostroke.backends.interface import PAGE
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex

SIZE = 2
Prefix = tuple[int, ...]
tokens = st.lists(st.integers(0, 1), max_size=9)
indices = st.integers(0, 5)


class Table:
    """An index as a table from page prefixes to pages and their times of last use."""

    def __init__(self) -> None:
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.clock = 0

    def touch(self, prefix: Prefix) -> None:
        self.used[prefix] = self.clock

    def match(self, prompt: list[int]) -> list[int]:
        self.clock += 1
        found = []
        for stop in range(SIZE, len(prompt) + 1, SIZE):
            if (prefix := tuple(prompt[:stop])) not in self.pages:
                break
            self.touch(prefix)
            found.append(self.pages[prefix])
        return found

    def insert(self, kv: KVCache, canonical: int) -> None:
        self.clock += 1
        for i, (start, stop, _, page) in enumerate(kv.table.tolist()):
            if (start, stop) != (0, SIZE) or (i + 1) * SIZE > canonical:
                break
            prefix = tuple(kv.tokens[: (i + 1) * SIZE])
            self.pages.setdefault(prefix, page)
            self.touch(prefix)

    def evict(self, count: int, held: set[int]) -> int:
        """Evicts unused leaves, the least recently used first; then unused prefixes with all that depends on them.

        So pages in `held` leave only if one before them does.
        """
        freed = 0
        while freed < count:
            parents = {prefix[:-SIZE] for prefix in self.pages}
            leaves = [p for p, page in self.pages.items() if p not in parents and page not in held]
            if not leaves:
                break
            del self.pages[min(leaves, key=lambda prefix: self.used[prefix])]
            freed += 1
        unused = [p for p, page in self.pages.items() if page not in held]
        for prefix in sorted(unused, key=lambda prefix: (self.used[prefix], -len(prefix))):
            if freed < count:
                gone = [p for p in self.pages if p[: len(prefix)] == prefix]
                freed += sum(self.pages.pop(p) not in held for p in gone)
        return freed


class Side:
    """An index with its pool, values, and table."""

    def __init__(self) -> None:
        self.pool: PagePool = make_pool(200, SIZE)
        self.index, self.table = PrefixIndex(self.pool, "m"), Table()
        self.values: list[KVCache] = []

    def keep(self, kv: KVCache) -> None:
        self.values.append(kv)
        del self.values[:-6]

    @property
    def held(self) -> set[int]:
        return {page for kv in self.values for page in kv.table[:, PAGE].tolist()}


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        gc.disable()
        self.side = Side()

    @rule(prompt=tokens, keep=st.booleans())
    def serve(self, prompt: list[int], keep: bool) -> None:
        """Match, compute the rest, insert, as an engine does."""
        side = self.side
        queried, hits = side.index.queried_tokens, side.index.hit_tokens
        hit = side.index.match(prompt)
        assert hit.table[:, PAGE].tolist() == side.table.match(prompt)
        assert side.index.queried_tokens - queried == len(prompt)
        assert side.index.hit_tokens - hits == len(hit)
        assert contents(hit) == contents(prefill(side.pool, prompt[: len(hit)]))
        kv = prefill(hit, prompt[len(hit) :])
        assert contents(kv) == contents(prefill(side.pool, prompt))
        side.index.insert(kv)
        side.table.insert(kv, len(kv))
        if keep:
            side.keep(kv)

    @rule(prompt=tokens, model=st.sampled_from(["m", "other"]))
    def compute_without_the_index(self, prompt: list[int], model: str) -> None:
        side = self.side
        side.keep(prefill(side.pool, prompt, model=model))

    @precondition(lambda self: self.side.values)
    @rule(
        i=indices, j=indices, start=st.integers(0, 5), stop=st.integers(0, 9), more=tokens, model=st.sampled_from("mo")
    )
    def rearrange(self, i: int, j: int, start: int, stop: int, more: list[int], model: str) -> None:
        """A slice or a splice, optionally continued."""
        side = self.side
        left, right = side.values[i % len(side.values)][:start], side.values[j % len(side.values)][stop:]
        fits = not len(left) or not len(right) or left.positions[-1] < right.positions[0]
        joined = left + right if fits else right
        side.keep(prefill(joined, more[:3], model=model))

    @precondition(lambda self: self.side.values)
    @rule(i=indices)
    def insert(self, i: int) -> None:
        side = self.side
        kv = side.values[i % len(side.values)]
        side.index.insert(kv)
        side.table.insert(kv, self._trusted(side.pool, kv))

    @staticmethod
    def _trusted(pool: PagePool, kv: KVCache) -> int:
        """The number of leading entries whose bits are those that "m" computes for the same tokens."""
        pairs: Any = zip(contents(kv), contents(prefill(pool, kv.tokens)), strict=True)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), len(kv))

    @precondition(lambda self: self.side.values)
    @rule(i=indices)
    def drop(self, i: int) -> None:
        side = self.side
        del side.values[i % len(side.values)]

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        side = self.side
        used = side.pool.num_used
        freed = side.index.evict(count)
        assert freed == used - side.pool.num_used
        assert freed == side.table.evict(count, side.held)

    @rule()
    def clear(self) -> None:
        side = self.side
        side.index.clear()
        side.table.pages.clear()

    @invariant()
    def counts_are_exact(self) -> None:
        side = self.side
        indexed = np.array(list(side.table.pages.values()), np.int64)
        check_counts(side.pool, [*(kv.table[:, PAGE] for kv in side.values), indexed])
        assert side.index.num_pages == len(indexed)

    def teardown(self) -> None:
        side = self.side
        side.index.clear()
        side.values.clear()
        gc.enable()
        assert side.pool.num_used == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
