"""Pages on their way into the pool, in three phases, so that nobody waits for a disk or a long copy.

`Arrival(...)` reserves frames, quickly. `load` reads, in any thread and without a lock. `attach` publishes, quickly.
Nothing that is half loaded is ever visible: until `attach`, the frames belong to no page.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from twostroke.errors import KVError, PageLost
from twostroke.kv import spans
from twostroke.kv.page_copies import Copy
from twostroke.kv.pages import HOST, NOWHERE, POOL
from twostroke.system.interrupts import Postponed

if TYPE_CHECKING:
    from twostroke.kv.moves import Moves


class Arrival:
    """Some distinct pages that are to be in frames. Their holder must live as long as the arrival is open.

    Two arrivals of one page both load it, and the later one gives its frame back.

    Attributes:
        missing: number of pages to load, by the tier that they come from; empty if all are in frames.
        num_loaded: number of them that are loaded.
        table: the pages as a pinned holder has them: what is in a frame stays there until `close`.
    """

    def __init__(self, pool: Moves, pages: np.ndarray) -> None:
        """Reserve frames. Raises OutOfPages: nothing has changed."""
        pool.make_room(int(np.count_nonzero(pool._frames[pages] == NOWHERE)))
        self._pool, self._pages = pool, pages[:0]
        self._frames: list[int] = []
        self._loading = self._loaded = self._closed = False
        self.table, self.num_loaded = spans.of_pages(pages), 0
        with Postponed(), pool.lock:
            pool.retain(pages)
            self._pages = pages
            pool.pin(self)
            try:
                self._absent: list[int] = pages[pool._frames[pages] == NOWHERE].tolist()
                sources = [pool._fullest(page) for page in self._absent]
                self._sources: list[Copy] = [copy for _, copy in sources]
                self._frames = pool._take_frames(len(self._absent))
                pool._reserved.update(self._frames)
            except BaseException:
                self.close()
                raise
        self.missing = dict(Counter(tier for tier, _ in sources))

    def load(self) -> None:
        """Read the missing pages into the reserved frames. Once, in any thread; no lock is held meanwhile.

        Returns early if the arrival is closed meanwhile. Raises PageLost: a page is gone or damaged.
        """
        with self._pool.lock:
            if self._loading or self._loaded or self._closed:
                return
            self._loading = True
        memory, done = self._pool.memory, False
        try:
            for frame, copy in zip(self._frames, self._sources, strict=True):
                if self._closed:
                    return
                try:
                    with memory.filling(frame) as view:
                        copy.read(view)
                    self.num_loaded += 1
                except BaseException:
                    memory.write_page(frame, bytes(memory.page_bytes))  # it is used again, and must not hold NaN
                    raise
            done = True
        finally:
            with self._pool.lock:
                self._loading, self._loaded = False, done
                if self._closed:
                    self._give_back_frames()

    def attach(self) -> None:
        """Let the loaded pages be found in their frames. Raises KVError: they are not loaded."""
        pool = self._pool
        with Postponed(), pool.lock:
            if self._closed or (self._absent and not self._loaded):
                raise KVError("these pages have not arrived: load them first")
            for page, frame in zip(self._absent, self._frames, strict=True):
                pool._reserved.discard(frame)
                if pool._frames[page] == NOWHERE:
                    pool._frames[page] = frame
                else:  # another arrival was first
                    pool._free.append(frame)
            absent = np.array(self._absent, np.int64)
            self._frames, self._sources, self._absent = [], [], []
            if len(absent) and pool._copies[HOST]:
                pool._drop_copies(absent)  # those that were spilled

    def close(self) -> None:
        """Give back what it still holds. Frames into which `load` is still reading come back when it has returned."""
        with self._pool.lock:
            self._closed = True
            if not self._loading:
                self._give_back_frames()
            pages, self._pages = self._pages, self._pages[:0]
            self._pool.unpin(self)
            self._pool.release(pages)

    def _give_back_frames(self) -> None:
        frames, self._frames, self._sources = self._frames, [], []
        self._pool._reserved.difference_update(frames)
        self._pool._free.extend(frames)  # atomic: a finalizer may do it without the lock

    def __del__(self) -> None:
        if len(self._pages):  # never closed
            self._give_back_frames()
            self._pool.unpin(self)
            self._pool.drop(self._pages, POOL)

    def __enter__(self) -> Arrival:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lost(page: int) -> PageLost:
    return PageLost(f"page {page} of this value is in no tier any more: compute the value again")
