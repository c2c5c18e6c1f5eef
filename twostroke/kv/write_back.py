"""Blocks and snapshots of a prefix index that wait to be written to a store.

What waits holds no frame, so it changes nothing about when the pool is full. A block of which a page leaves the index
before it is written is copied then, as far as there is room for copies. So a copy costs a block's bytes only where a
frame is needed at once, which is when tokens are computed: that takes many times as long.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from twostroke.errors import OutOfPages
from twostroke.kv.page_contents import reading
from twostroke.kv.page_copies import HostCopy
from twostroke.kv.pool import LOCKED_BYTES
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.tiers.admission import Admission
from twostroke.kv.tiers.names import Namespace, PageName
from twostroke.kv.tiers.store import Store
from twostroke.system.slab import SlabAllocator

COPIED_FRACTION = 64  # of the pool's pages, one in so many may be a copy that waits
MIN_COPIES = 16


class WriteBackBlock:
    """A block, or a part of a snapshot as large as one, that waits to be written.

    It is still in the index (`pages`), copied (`copy`), or lost (neither). `used`: the bytes of each page that count.
    """

    __slots__ = ("__weakref__", "copy", "pages", "used")

    def __init__(self, pages: list[int], used: list[int]) -> None:
        self.pages: list[int] | None = None if NO_PAGE in pages else pages
        self.copy: HostCopy | None = None
        self.used = used


class WriteBack:
    """The blocks of one prefix index that wait to be written. A block that no writer holds any more is forgotten."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index, self._pool = index, index.pool
        self._waiting: WeakValueDictionary[int, WriteBackBlock] = WeakValueDictionary()  # by each of its pages
        self.slots = SlabAllocator(index.pool.block_bytes)
        self.max_copies = max(MIN_COPIES, index.pool.num_pages // index.pool.num_groups // COPIED_FRACTION)
        self._columns = [group for group, _ in index.pool.geometry.kv_groups]
        index.on_remove.append(self._copy_leaving)

    def enqueue(self, blocks: Sequence[int]) -> list[WriteBackBlock]:
        """Let indexed blocks wait. The caller has held the pool's lock since it knows that they are indexed."""
        pages = (
            [of_block[column] for column in self._columns] for of_block in map(self._index.blocks.of_block, blocks)
        )
        whole = [self._pool.geometry.group_bytes[group] * self._pool.page_size for group in self._columns]
        return [self._wait(own, whole) for own in pages]

    def enqueue_snapshot(self, block: int) -> list[WriteBackBlock]:
        """Let the parts of the snapshot behind an indexed block wait, as `enqueue` does; none if there is no snapshot.

        Each has as many pages as a block; the last one may have fewer.
        """
        pages, size = self._index.blocks.snapshot(block), len(self._columns)
        used = self._pool.geometry.state_pages(self._pool.page_size).used_bytes if pages else []
        return [self._wait(pages[i : i + size], used[i : i + size]) for i in range(0, len(pages), size)]

    def _wait(self, pages: list[int], used: list[int]) -> WriteBackBlock:
        waiting = self._waiting.get(pages[0]) or WriteBackBlock(pages, used)
        self._waiting.update(dict.fromkeys(waiting.pages or (), waiting))
        return waiting

    def read(self, waiting: Sequence[WriteBackBlock]) -> list[memoryview]:
        """Copy the leading blocks that are not lost. The lock is held for a few at a time."""
        pool, few, copies = self._pool, max(1, LOCKED_BYTES // self._pool.block_bytes), list[memoryview]()
        for first in range(0, len(waiting), few):
            with pool.lock:
                for one in waiting[first : first + few]:
                    data = np.zeros(pool.block_bytes, np.uint8).data
                    if one.copy is not None:
                        one.copy.read(data)
                    elif one.pages is not None:
                        self._join(one.pages, one.used, data)
                    else:
                        return copies
                    copies.append(data)
        return copies

    def _join(self, pages: list[int], used: list[int], into: memoryview) -> None:
        """Copy the used bytes of pages, each to the place of a whole one."""
        size = self._pool.page_bytes
        with reading(self._pool, np.array(pages), np.full(len(pages), self._pool.page_size)) as sources:
            for i, source in enumerate(sources):
                into[i * size : i * size + used[i]] = source.data()[: used[i]]

    def _copy_leaving(self, pages: Sequence[int]) -> None:
        """Copy those blocks that wait before a page of theirs leaves the index. Called under the pool's lock."""
        for page in pages if self._waiting else ():
            if (one := self._waiting.pop(page, None)) is None or one.pages is None:
                continue
            block, one.pages, one.copy = one.pages, None, self._new_copy()
            if one.copy is not None:
                data = np.zeros(self._pool.block_bytes, np.uint8).data
                self._join(block, one.used, data)
                one.copy.fill(data, self._pool.page_size)

    def _new_copy(self) -> HostCopy | None:
        if self.slots.num_used >= self.max_copies:
            return None
        try:
            return HostCopy(self.slots)
        except OutOfPages:  # there is no memory
            return None


class QueuedWrite:
    """Some consecutive blocks of a prompt, or the parts of a snapshot, that wait to be written to a store."""

    def __init__(
        self,
        write_back: WriteBack,
        namespace: Namespace,
        store: Store,
        admission: Admission,
        names: list[PageName],
        offered: list[WriteBackBlock],
        group: int,
    ) -> None:
        """`group`: how many of them are copied at once."""
        self._write_back, self._namespace, self._store, self._admission = write_back, namespace, store, admission
        self._names, self._offered, self._group = names, offered, group
        self._written = 0
        self.pages, self.size = len(names), len(names) * namespace.page_bytes

    def write(self) -> None:
        """Write copies: a store that hangs keeps no frame, and no index waits for it."""
        if self._names[0].of_state and self._store.find(self._namespace, self._names) == self.pages:
            self._written = self.pages  # another process was quicker
            return
        for start in range(0, self.pages, self._group):
            some = self._offered[start : start + self._group]
            copies = self._write_back.read(some)
            names = self._names[start : start + len(copies)]
            self._written += self._store.write(self._namespace, names, copies) if copies else 0
            if len(copies) < len(some):
                self._store.counters.skipped("queue", self.pages - start - len(copies))
            if self._written < start + len(some):
                return
        if self._names[0].of_state:
            self._store.counters.snapshot("out")

    def drop(self) -> None:
        self._offered = []
        self._admission.missing(self._names[self._written :])
