"""The pages that a prefix index holds, and which of them leave when frames are needed.

Pages are kept in the order of their last use, the deepest of a prompt first. A use of a page is a use of all pages
before it, so no page comes after one that is deeper. Of windowed pages and snapshots only the last ones of a hit count
as used, so those in the middle of prompts leave first, and those where prompts part stay. When frames are needed, the
first pages that only the index holds are spilled to the host, where they stay indexed, as far as its budget goes; pages
of the host that were not used for the longest time make room. Without room there, they leave the index.

Of models with recurrent layers a hit is worth what its snapshot saves, so last use alone would let many short prompts,
whose snapshots save little, drive out a long one. Their pages leave by price (`snapshot_prices`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import numpy as np

from twostroke.errors import OutOfPages
from twostroke.kv.block_pages import BlockPages
from twostroke.kv.host_budget import HostBudget
from twostroke.kv.page_tree import PageTree
from twostroke.kv.pages import NOWHERE
from twostroke.kv.pool import PagePool
from twostroke.kv.snapshot_prices import SnapshotPrices
from twostroke.kv.tier_moves import spill

SCAN_PAGES = 512  # pages that are looked at together for those that could leave


class EvictablePages:
    """Blocks with one reference to each of their pages, by last use. The pool's lock guards them.

    Attributes:
        blocks: which pages each block has.
        evicted_pages, evicted_snapshots: totals of frames that `evict` has freed, and of snapshots that it let go.
        prices: of pages, where there are snapshots; else none has one.
        host: budget of the host; 0 bytes unless it is set.
        on_remove: called under the pool's lock with pages of any group that leave the index, before they are released.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool, self.blocks, self.host = pool, BlockPages(pool), HostBudget()
        self._tree = PageTree()  # which pages come after which
        self.evicted_pages = self.evicted_snapshots = 0
        self.prices = SnapshotPrices(self.blocks, pool.snapshot_pages)
        self.on_remove: list[Callable[[Sequence[int]], None]] = []
        # Each kind of a block's pages is in one of these by its first page.
        self._in_pool: dict[int, None] = {}  # indexed pages by last use, the least recent and deepest first
        self._in_host: dict[int, None] = {}  # those that were spilled and may be in the host, in the same order

    def evict(self, count: int) -> int:
        """Free up to `count` frames of pages that only the index holds, least recently used and deepest first.

        Returns the number of frames freed; where pages have prices, as many as a snapshot has are freed at once. Pages
        that the host has room for stay indexed. If pages in use block an
        unused prefix that has to leave (a slice may hold only the end of a prompt), they leave the index too, but no
        more than necessary.
        """
        with self.pool.lock:
            count = max(count, self.pool.snapshot_pages if count > 0 else 0)
            freed = self._spill_to_host(count)
            if freed < count and self._in_host:
                self._mark_returned(self._in_host)
                freed += self._spill_to_host(count - freed)
            freed += self._evict_from_pool(count - freed, in_use=False)
            freed += self._evict_from_pool(count - freed, in_use=True)
            self.evicted_pages += freed
            return freed

    @property
    def num_evictable(self) -> int:
        """Number of frames that `evict` could free."""
        with self.pool.lock:
            return self.pool.num_would_free(np.array(self.pages, np.int64))

    def can_evict(self, count: int) -> bool:
        """Whether `evict` could free so many frames. Looks at pages that would go first, and rarely at all."""
        with self.pool.lock:
            pages, found = chain(self._in_pool, self._in_host), 0
            while found < count and (some := list(islice(pages, SCAN_PAGES))):
                found += self.pool.num_would_free(np.array(self.blocks.behind_all(some), np.int64))
            return found >= count

    def clear(self) -> None:
        """Drop all pages from the index."""
        with self.pool.lock:
            for page in [*self._in_host, *self._in_pool]:
                if page in self._in_host or page in self._in_pool:
                    self._remove_and_release(page)

    @property
    def pages(self) -> list[int]:
        return self.blocks.behind_all([*self._in_pool, *self._in_host])

    @property
    def num_pages(self) -> int:
        """Number of indexed pages, in the pool or in the host."""
        return self.num_in_pool + self.blocks.count(self._in_host)

    @property
    def num_in_pool(self) -> int:
        """Number of indexed pages in the pool."""
        return self.blocks.count(self._in_pool)

    def pages_in_pool(self) -> np.ndarray:
        """The ids of these pages. The pool's lock must be held."""
        return np.array(self.blocks.behind_all(list(self._in_pool)), np.int64)

    def _freeable(self, firsts: list[int]) -> list[int]:
        """Those whose pages' release would free a frame for each page."""
        pages = np.array(firsts, np.int64)
        found = pages[self.pool.would_free(pages)].tolist()
        behind = self.blocks.behind_all(found)
        if len(behind) == len(found):
            return found
        starts = np.cumsum([0, *(len(self.blocks.behind(first)) for first in found[:-1])])
        free = np.logical_and.reduceat(self.pool.would_free(np.array(behind, np.int64)), starts)
        return [first for first, all_free in zip(found, free.tolist(), strict=True) if all_free]

    def _retain(self, pages: list[int]) -> None:
        self.pool.retain(np.array(pages, np.int64))
        self._in_pool.update(dict.fromkeys(pages))

    def _touch(self, blocks: list[int]) -> None:
        """Note the use of a prompt's blocks: the deepest is the first of them to go."""
        for first in self.blocks.used_by(blocks):
            self._use(first)
        if self._in_host:  # an earlier hit may have brought back what this one does not use
            self._mark_returned([first for first in self.blocks.windowed(blocks) if first in self._in_host])
        self.prices.use(blocks)

    def _use(self, page: int) -> None:
        order = self._in_pool
        if page in self._in_host:
            self._mark_returned([page])
            order = self._in_host if page in self._in_host else self._in_pool
        del order[page]
        order[page] = None

    def _spill_to_host(self, count: int) -> int:
        """Move unused pages to the host as far as there is room. Returns the number of frames freed."""
        size = self.pool.page_bytes
        if self.host.max_bytes < size or count <= 0:
            return 0
        firsts, reserved = list[int](), 0
        for first in self._freeable(list(self.prices.cheapest_first(self._in_pool)))[:count]:
            if reserved >= count or not self._reserve_host(size * self.blocks.count([first])):
                break
            firsts.append(first)
            reserved += self.blocks.count([first])
        firsts = [first for first in firsts if first in self._in_pool]  # making room may have removed some
        began = time.perf_counter()
        try:
            freed = spill(self.pool, np.array(self.blocks.behind_all(firsts), np.int64)) if firsts else 0
        except OutOfPages:  # there is no memory left for it
            freed = 0
        moved = [first for first in firsts if self._away(first)]
        pages = self.blocks.count(moved)
        self.host.take(-size * (reserved - pages))
        self.prices.left(moved)
        for first in moved:
            del self._in_pool[first]
            self._in_host[first] = None
        self.host.traffic.moved("out", pages, pages * size, time.perf_counter() - began)
        return max(freed, pages)

    def _away(self, first: int) -> bool:
        return any(self.pool.frame(page) == NOWHERE for page in self.blocks.behind(first))

    def _reserve_host(self, size: int) -> bool:
        """Take room for a page in the host, if necessary that of the least recently used pages there."""
        while not (taken := self.host.take(size)) and self._in_host:
            first = next(filter(self._goes_alone, self._in_host), next(iter(self._in_host)))
            if self._away(first):
                self._remove_and_release(first)
            else:
                self._mark_returned([first])
        return taken

    def _mark_returned(self, pages: Iterable[int]) -> None:
        """Note those of these pages of the host that strokes have brought back."""
        for page in [page for page in pages if not self._away(page)]:
            del self._in_host[page]
            self._in_pool[page] = None
            size = self.blocks.count([page])
            self.host.take(-size * self.pool.page_bytes)
            self.host.traffic.moved("in", size, size * self.pool.page_bytes, 0.0)

    def _evict_from_pool(self, count: int, in_use: bool) -> int:
        """Remove unused pages of the pool, with all after them. Returns the number of frames freed.

        Pages that others follow go only if `in_use`, since those are used.
        """
        if count <= 0:
            return 0
        gone: list[int] = []  # released together, since that takes as long for one as for many
        freed, looked = 0, SCAN_PAGES
        order = self.prices.cheapest_first(self._in_pool)
        while freed < count:
            some = [page for page in islice(order, looked) if page in self._in_pool]
            all_looked_at = looked >= len(order)
            for page in self._freeable(some):
                if freed >= count:
                    break
                if page in self._in_pool and (in_use or self._goes_alone(page)):
                    self.prices.left([page])
                    pages = self._detach(page)
                    freed += 1 if len(pages) == 1 else self.pool.num_would_free(np.array(pages, np.int64))
                    gone += pages
            if all_looked_at:
                break
            looked *= 4  # rarely: the first are those that were not used for the longest time
        left = np.array(gone, np.int64)
        if self.pool.snapshot_pages:
            states = np.count_nonzero(self.pool.group_of[left] == self.pool.num_groups)
            self.evicted_snapshots += int(states) // self.pool.snapshot_pages
        self.pool.release(left)
        return freed

    def _remove_and_release(self, page: int) -> int:
        """Remove a page and all after it. Returns the number of frames freed."""
        return self.pool.release(np.array(self._detach(page), np.int64))

    def _goes_alone(self, first: int) -> bool:
        """Whether nothing else leaves the index with these pages."""
        return self.blocks.is_windowed(first) or self._tree.is_leaf(first)

    def _detach(self, first: int) -> list[int]:
        """Forget windowed pages of a block, or a block and all after it.

        Returns all pages that left the index, which still have its references.
        """
        if self.blocks.is_windowed(first):
            firsts = self.blocks.part(first)
        else:
            firsts = self.blocks.with_windowed(self._tree.remove(first))
        pages = self.blocks.behind_all(firsts)
        for leave in self.on_remove:
            leave(pages)
        self.prices.forget(firsts)
        for one in firsts:
            size = self.blocks.forget(one)
            if one in self._in_host:
                del self._in_host[one]
                self.host.take(-size * self.pool.page_bytes)
            else:
                del self._in_pool[one]
        return pages
