"""Pages of a prefix index that wait to be written to a store.

What waits holds no frame, so it changes nothing about when the pool is full. A page that leaves the index before it is
written is copied then, as far as there is room for copies. So a copy costs a page's bytes only where a frame is needed
at once, which is when tokens are computed: that takes many times as long.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from twostroke.errors import OutOfPages
from twostroke.kv.page_contents import reading
from twostroke.kv.page_copies import HostCopy
from twostroke.kv.pool import LOCKED_BYTES
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.system.slab import SlabAllocator

COPIED_FRACTION = 64  # of the pool's pages, one in so many may be a copy that waits
MIN_COPIES = 16


class WriteBackPage:
    """A page that waits to be written: still in the index (`page`), copied (`copy`), or lost (neither)."""

    __slots__ = ("__weakref__", "copy", "page")

    def __init__(self, page: int) -> None:
        self.page: int | None = page
        self.copy: HostCopy | None = None


class WriteBack:
    """The pages of one prefix index that wait to be written. A page that no writer holds any more is forgotten."""

    def __init__(self, index: PrefixIndex) -> None:
        self._pool = index.pool
        self._waiting: WeakValueDictionary[int, WriteBackPage] = WeakValueDictionary()
        self._slots = SlabAllocator(index.pool.page_bytes)
        self._max_copies = max(MIN_COPIES, index.pool.num_pages // COPIED_FRACTION)
        index.on_remove.append(self._copy_leaving)

    def enqueue(self, pages: Sequence[int]) -> list[WriteBackPage]:
        """Let indexed pages wait. The caller has held the pool's lock since it knows that they are indexed."""
        waiting = [self._waiting.get(page) or WriteBackPage(page) for page in pages]
        self._waiting.update(zip(pages, waiting, strict=True))
        return waiting

    def read(self, waiting: Sequence[WriteBackPage]) -> list[memoryview]:
        """Copy the leading pages that are not lost. The lock is held for a few at a time."""
        pool, few, copies = self._pool, max(1, LOCKED_BYTES // self._pool.page_bytes), list[memoryview]()
        for first in range(0, len(waiting), few):
            with pool.lock:
                for one in waiting[first : first + few]:
                    data = np.empty(pool.page_bytes, np.uint8).data
                    if one.copy is not None:
                        one.copy.read(data)
                    elif one.page is not None:
                        with reading(pool, np.array([one.page]), np.array([pool.page_size])) as (source,):
                            data[:] = source.data()
                    else:
                        return copies
                    copies.append(data)
        return copies

    def _copy_leaving(self, pages: Sequence[int]) -> None:
        """Copy those of the pages that wait before they leave the index. Called under the pool's lock."""
        pool = self._pool
        for page in pages if self._waiting else ():
            if (one := self._waiting.pop(page, None)) is None:
                continue
            one.page, one.copy = None, self._new_copy()
            if one.copy is not None:
                with reading(pool, np.array([page]), np.array([pool.page_size])) as (source,):
                    one.copy.fill(source.data(), pool.page_size)

    def _new_copy(self) -> HostCopy | None:
        if self._slots.num_used >= self._max_copies:
            return None
        try:
            return HostCopy(self._slots)
        except OutOfPages:  # there is no memory
            return None
