"""Faults of stores: the n-th call fails."""

from collections.abc import Generator
from contextlib import contextmanager

from tests.kv.tiers.memory_store import MemoryStore
from twostroke.errors import OutOfPages, PageLost
from twostroke.kv.pool import PagePool


class Faults:
    """Stores of which one call fails, when it is told so.

    Attributes:
        raised: whether a call failed since the last `after`.
    """

    def __init__(self) -> None:
        self.raised = False
        self._left: int | None = None

    def store(self, tier: str) -> MemoryStore:
        store = MemoryStore(tier)
        store.before = self._call
        return store

    @contextmanager
    def after(self, count: int | None) -> Generator[None]:
        """Let `count` calls succeed and the next one fail, within this context; None: all succeed."""
        self.raised, self._left = False, count
        try:
            yield
        finally:
            self._left = None

    def _call(self, what: str) -> None:
        if self._left is None or what not in ("keep", "fetch"):
            return
        if self._left == 0:
            self.raised, self._left = True, None
            raise OutOfPages("injected: full") if what == "keep" else PageLost("injected: lost")
        self._left -= 1

    def kept(self, pool: PagePool) -> dict[str, int]:
        """Number of private pages in each store of a pool, once all deletions are done."""
        return {tier: kept(pool, tier) for tier in pool.stores}


def kept(pool: PagePool, tier: str) -> int:
    """Number of private pages in a pool's store, once all deletions are done."""
    if tier in pool.private:
        assert pool.private[tier].settle(60)
    store = pool.stores[tier]
    assert isinstance(store, MemoryStore)
    return len(store.private)
