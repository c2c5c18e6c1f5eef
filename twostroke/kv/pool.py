"""Pages of KV entries, shared by reference count."""

import threading
from collections.abc import Callable, Iterable

import numpy as np

from twostroke.backends.memory import Memory
from twostroke.errors import OutOfPages
from twostroke.kv.geometry import Geometry

FREE = -1  # how far a page on the free list is filled


class PagePool:
    """All pages of one geometry on one device.

    Attributes:
        reclaim: called with a number of pages when the free list runs short; may release some (prefix eviction).
    """

    def __init__(self, geometry: Geometry, memory: Memory, num_pages: int, page_size: int = 16) -> None:
        """`memory` has room for so many pages of the geometry."""
        self.geometry, self.memory, self.num_pages, self.page_size = geometry, memory, num_pages, page_size
        self.entry_bytes = geometry.entry_bytes
        self.reclaim: Callable[[int], None] | None = None
        self._refs = np.zeros(num_pages, np.int64)
        self._filled = np.full(num_pages, FREE, np.int64)  # slots of each page that some value has claimed
        self._free = list(range(num_pages - 1, -1, -1))
        # Values are released by whichever thread drops them, garbage collection included: hence reentrant.
        self._lock = threading.RLock()

    @property
    def page_bytes(self) -> int:
        return self.entry_bytes * self.page_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. Raises OutOfPages, having taken none."""
        if not count:
            return []
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        with self._lock:
            if count > len(self._free):
                raise OutOfPages(
                    f"{count} more KV pages are needed and {len(self._free)} of {self.num_pages} are free: drop "
                    f"values that are no longer used, or give the pool more memory (kv_bytes)"
                )
            pages = [self._free.pop() for _ in range(count)]
            self._refs[pages] = 1
            self._filled[pages] = 0
            return pages

    def retain(self, pages: np.ndarray) -> None:
        """One more reference for every occurrence of a page."""
        with self._lock:
            np.add.at(self._refs, pages, 1)

    def release(self, pages: np.ndarray) -> None:
        """One reference less for every occurrence; a page without any is free."""
        with self._lock:
            np.subtract.at(self._refs, pages, 1)
            # The garbage collector may drop another value right here and free some of these pages: not twice.
            freed = np.unique(pages[(self._refs[pages] == 0) & (self._filled[pages] != FREE)])
            self._filled[freed] = FREE
            self._free.extend(freed[::-1].tolist())

    def references(self, page: int) -> int:
        return int(self._refs[page])

    def claim(self, page: int, start: int, stop: int) -> bool:
        """Take slots [start, stop) of a page for writing; False where another value wrote at `start` already."""
        with self._lock:
            if self._filled[page] != start:
                return False
            self._filled[page] = stop
            return True

    def unclaim(self, page: int, start: int) -> None:
        """Give back the slots from `start` on, claimed last and in no value."""
        with self._lock:
            self._filled[page] = start

    def copy_slots(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy slots [start, stop) of one page to the same slots of a fresh one, in every layer."""
        slots = np.arange(start, stop)
        self.write(np.full_like(slots, target), slots, self.read(np.full_like(slots, source), slots))
        self._filled[target] = stop

    def read(self, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather entries: [layers, 2, n, Hkv, D], a copy."""
        return self.memory.read(pages, slots)

    def read_keys(self, layer: int, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather one layer's keys: [n, Hkv, D], a copy."""
        return self.memory.read_keys(layer, pages, slots)

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        """Scatter entries, the inverse of `read`."""
        self.memory.write(pages, slots, entries)


def check_counts(pool: PagePool, holders: Iterable[np.ndarray]) -> None:
    """Raise AssertionError unless the pool's reference counts are exactly those of `holders`' pages (for tests)."""
    expected = np.zeros(pool.num_pages, np.int64)
    for pages in holders:
        np.add.at(expected, pages, 1)
    held = np.array([pool.references(page) for page in range(pool.num_pages)])
    assert (held == expected).all(), f"pages {np.flatnonzero(held != expected).tolist()} are miscounted"
    assert pool.num_used == np.count_nonzero(expected)
