"""Counts the pages of each pool: free, evictable, or held by requests and values."""

from collections.abc import Iterable

from twostroke.engine.load_queue import LoadQueue
from twostroke.engine.model import Model
from twostroke.engine.request import Choice
from twostroke.kv.pool import PagePool


class PageBudget:
    """The pools of an engine's models, whose prefix indexes give pages up when a pool has none that is free."""

    def __init__(self, models: Iterable[Model], loads: LoadQueue) -> None:
        # max_chunk: the most tokens of a prompt that a step enters
        self._models, self._loads, self.max_chunk = list(models), loads, 1
        self.pools = list(dict.fromkeys(model.pool for model in self._models))
        for pool in self.pools:
            pool.reclaim = lambda count, pool=pool: self._evict(pool, count)

    def close(self) -> None:
        """Drop the prefix indexes, and let go of the pools: values may outlive the engine."""
        for model in self._models:
            if model.index is not None:
                model.index.clear()
            model.pool.reclaim = None

    def cached_pages(self, pool: PagePool) -> int:
        """Number of the pool's pages that prefix indexes hold."""
        return sum(m.index.num_in_pool for m in self._models if m.index is not None and m.pool is pool)

    @property
    def evicted_pages(self) -> int:
        """Number of times that a page of a prefix index had to give up its frame."""
        return sum(model.index.evicted_pages for model in self._models if model.index is not None)

    @property
    def pages_returning(self) -> bool:
        """Whether there are pages that nobody wants, and that come back when nothing is under way to them."""
        return self._loads.frames_returning or any(pool.num_quarantined for pool in self.pools)

    def could_hold(self, pool: PagePool, pages: int) -> bool:
        """Whether so many pages are free, or will be once unused prefix pages are evicted.

        Pages are evicted when they are needed, a few in each step, since what goes to the host is copied.
        """
        missing = pages - pool.num_free
        if missing <= 0:
            return True
        indexes = [m.index for m in self._models if m.index is not None and m.pool is pool]
        if len(indexes) == 1:
            return indexes[0].can_evict(missing)
        return missing <= self._evictable(pool)

    def pages_for(self, pool: PagePool, tokens: int) -> int:
        """Number of pages that a prompt of so many tokens takes, and the next token."""
        return pool.geometry.num_pages(tokens, pool.page_size, self.max_chunk) + pool.pages_to_go_on

    def in_use(self) -> dict[PagePool, int]:
        """Number of each pool's pages that others than prefix indexes hold."""
        return {pool: pool.num_used - self._evictable(pool) for pool in self.pools}

    def _evictable(self, pool: PagePool) -> int:
        """Number of the pool's pages that only prefix indexes hold."""
        return sum(m.index.num_evictable for m in self._models if m.index is not None and m.pool is pool)

    def _evict(self, pool: PagePool, count: int) -> None:
        for model in self._models:
            if model.index is not None and model.pool is pool and count > 0:
                count -= model.index.evict(count)


def pages_held(choice: Choice) -> dict[PagePool, int]:
    """Number of pages that the lanes of a choice hold in each pool, plus those to continue."""
    pages: dict[PagePool, set[int]] = {}
    for lane in choice.lanes:
        pages.setdefault(lane.model.pool, set()).update(lane.writer.pages.tolist())
    return {pool: len(held) + pool.pages_to_go_on for pool, held in pages.items()}
