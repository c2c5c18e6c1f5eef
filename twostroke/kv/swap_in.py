"""Pages swapped into the pool in three phases, so that nobody waits for a disk or a long copy.

`SwapIn(...)` reserves frames, quickly. `load` reads, in any thread and without a lock. `publish` lets the pages be
found in their frames, quickly. Nothing that is half loaded is ever visible: until `publish`, the frames belong to no
page.
"""

from collections import Counter
from types import TracebackType

import numpy as np

from twostroke.errors import KVError
from twostroke.kv.page_copies import PageCopy
from twostroke.kv.pages import HOST, POOL
from twostroke.kv.pool import PagePool
from twostroke.system.interrupts import DeferredInterrupts


class SwapIn:
    """Some distinct pages that are to be in frames. Their holder must live as long as this is open.

    Two of them may load the same page; the later one gives its frame back.

    Attributes:
        missing: number of pages to load, by the tier that they come from; empty if all are in frames.
        num_loaded: number of them that are loaded.
        pages: what of them is in a frame stays there until `close`.
    """

    def __init__(self, pool: PagePool, pages: np.ndarray) -> None:
        """Reserve frames. Raises OutOfPages or PageLost: nothing has changed."""
        pool.make_room(int(np.count_nonzero(pool.frames.absent(pages))))
        self._pool, self._pages = pool, pages[:0]
        self._frames: list[int] = []
        self._loading = self._loaded = self._closed = False
        self.pages, self.num_loaded = pages, 0
        with DeferredInterrupts(), pool.lock:
            pool.retain(pages)
            self._pages = pages
            pool.pins.add(self)
            try:
                self._absent = pages[pool.frames.absent(pages)]
                sources = [pool.copies.fullest(page) for page in self._absent.tolist()]
                self._sources: list[PageCopy] = [copy for _, copy in sources]
                self._frames = pool.reserve_frames(len(self._absent))
            except BaseException:
                self.close()
                raise
        self.missing = dict(Counter(tier for tier, _ in sources))

    def load(self) -> None:
        """Read the missing pages into the reserved frames. Once, in any thread; no lock is held meanwhile.

        Returns early if this is closed meanwhile. Raises PageLost: a page is gone or damaged.
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
                    self._cancel_frames()

    def publish(self) -> None:
        """Let the loaded pages be found in their frames. Raises KVError: they are not loaded."""
        pool = self._pool
        with DeferredInterrupts(), pool.lock:
            if self._closed or (len(self._absent) and not self._loaded):
                raise KVError("these pages have not arrived: load them first")
            for page, frame in zip(self._absent.tolist(), self._frames, strict=True):
                pool.frames.fill(page, frame)
            loaded, self._absent, self._frames, self._sources = self._absent, self._absent[:0], [], []
            if len(loaded) and pool.copies.in_tier(HOST):
                pool.drop_unneeded_copies(loaded)  # those that were spilled

    def close(self) -> None:
        """Give back what it still holds. Frames into which `load` is still reading come back when it has returned."""
        with self._pool.lock:
            self._closed = True
            if not self._loading:
                self._cancel_frames()
            pages, self._pages = self._pages, self._pages[:0]
            self._pool.pins.remove(self)
            self._pool.release(pages)

    def _cancel_frames(self) -> None:
        frames, self._frames, self._sources = self._frames, [], []
        self._pool.frames.cancel(frames)

    def __del__(self) -> None:
        if len(self._pages):  # never closed
            self._cancel_frames()
            self._pool.pins.remove(self)
            self._pool.drop(self._pages, POOL)

    def __enter__(self) -> "SwapIn":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
