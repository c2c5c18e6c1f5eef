"""Logical pages: reference counts, and where each page is.

Values, writers and prefix indexes hold page ids, and the pool knows where each page is. A page may be in a *frame* of
the pool's memory, where kernels read it, in a copy in the host's ordinary memory, or in both. So a page can leave the
pool and come back without any change to its holders.

These rules decide where a page is:

- A reference asks for a page in one tier: `POOL` or `HOST`. The last reference of `POOL` frees the frame, the last
  reference of `HOST` frees the copy. The page's id is free when it has no reference at all.
- `spill` takes frames away from pages that are still referenced; the host's copy is then the only one. `fetch` brings
  them back.
- Pages that an open writer holds stay in their frames. So a step needs only the `fetch` when a writer opens: `frames`
  then finds a frame for each of its pages.

The contents of a claimed slot never change, so a copy stays valid for the slots that it was made for.

Any thread may make, cut and drop values. `lock` guards the counts, the places of pages, and the prefix indexes.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.backends.memory import HostMemory, Memory
from twostroke.errors import OutOfPages
from twostroke.system.interrupts import Postponed

POOL, HOST = "pool", "host"  # the tiers that a reference can ask for
FREE = -1  # fill level of a page without references
NOWHERE = -1  # frame of a page that is not in the pool
MOST_COPIES = 1 << 20  # maximum number of pages in the host tier


class Holder(Protocol):
    """An open writer, or something else that needs its pages where they are."""

    @property
    def table(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Pin:
    """Keeps pages in place while they are read."""

    table: np.ndarray


@dataclass
class HostCopy:
    """A copy of a page in the host's ordinary memory (one frame), valid in the slots before `stop`."""

    memory: HostMemory
    stop: int = 0


class Pages(ABC):
    """All pages of a pool.

    Attributes:
        memory: the frames; num_pages: the number of frames.
        reclaim: called with the number of missing frames; may release some (prefix eviction).
        lock: held for every change of a count or a place, and across several changes that must agree.
    """

    def __init__(self, memory: Memory, num_pages: int) -> None:
        self.memory, self.num_pages = memory, num_pages
        self.reclaim: Callable[[int], None] | None = None
        self._pins: dict[int, weakref.ref[Holder]] = {}  # those that need their pages in place, by id
        self._dropped: deque[tuple[np.ndarray, str]] = deque()  # references to remove once the lock is free
        most = num_pages + MOST_COPIES  # untouched parts of these arrays take no memory
        self._references = {POOL: np.zeros(most, np.int64), HOST: np.zeros(most, np.int64)}
        self._filled = np.zeros(most, np.int64)  # claimed slots of each page, or FREE
        self._frames = np.zeros(most, np.int32)  # frame of each page, or NOWHERE
        self._copies: dict[int, HostCopy] = {}
        self._free = list(range(num_pages - 1, -1, -1))  # free frames
        self._free_ids: list[int] = []
        self._num_ids = 0  # ids used so far
        # Garbage collection may drop values in a thread that holds the lock: so the lock is reentrant.
        self.lock = threading.RLock()

    # Facts -----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of frames that hold no page."""
        self._settled()
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of frames that hold a page."""
        return self.num_pages - self.num_free

    @property
    def num_copies(self) -> int:
        """Number of pages in the host tier, each of `page_bytes` bytes."""
        self._settled()
        return len(self._copies)

    @property
    def num_held(self) -> int:
        """Number of pages with a reference, in any tier."""
        self._settled()
        return self._num_ids - len(self._free_ids)

    def references(self, page: int, tier: str = POOL) -> int:
        self._settled()
        return int(self._references[tier][page])

    def frees(self, page: int) -> bool:
        """Whether releasing one `POOL` reference would free a frame."""
        return bool(self._references[POOL][page] == 1 and self._frames[page] != NOWHERE)

    # References ------------------------------------------------------------------------------------------------

    def allocate(self, count: int, tier: str = POOL) -> list[int]:
        """Allocate `count` empty pages with one reference each. On OutOfPages none is taken."""
        if not count:
            return []
        with self.lock:
            copies = [self._blank_copy() for _ in range(count if tier == HOST else 0)]
            frames = self._take_frames(count if tier == POOL else 0)
            pages = [self._new_id() for _ in range(count)]
            self._filled[pages] = 0
            self._frames[pages] = frames or NOWHERE
            self._copies.update(zip(pages, copies, strict=False))
            self._references[tier][pages] = 1
            return pages

    def _new_id(self) -> int:
        if self._free_ids:
            return self._free_ids.pop()
        self._num_ids += 1
        return self._num_ids - 1

    def _take_frames(self, count: int) -> list[int]:
        self._settled()
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        if count > len(self._free):
            raise OutOfPages(
                f"{count} more KV pages are needed and {len(self._free)} of {self.num_pages} are free: drop "
                f"values that are no longer used, or give the pool more memory (kv_bytes)"
            )
        return [self._free.pop() for _ in range(count)]

    def _blank_copy(self) -> HostCopy:
        if len(self._copies) >= MOST_COPIES:
            raise OutOfPages(f"the host tier is full ({MOST_COPIES:,} pages): drop values in it")
        try:
            return HostCopy(self._blank())
        except MemoryError:
            raise OutOfPages("there is no memory for another page in the host tier: drop values in it") from None

    @abstractmethod
    def _blank(self) -> HostMemory:
        """Uninitialized memory of one frame in the pool's layout."""

    def retain(self, pages: np.ndarray, tier: str = POOL) -> None:
        """Add one reference for every occurrence of a page, without moving it (see `bring` and `fetch`)."""
        with self.lock:
            np.add.at(self._references[tier], pages, 1)

    def release(self, pages: np.ndarray, tier: str = POOL) -> int:
        """Remove one reference for every occurrence, and free pages without references. Returns frames freed.

        The garbage collector may drop another value between any two lines here, and free some of these pages. So each
        step checks again which pages are still to be freed.
        """
        in_pool, in_host = self._references[POOL], self._references[HOST]
        with Postponed(), self.lock:
            np.subtract.at(self._references[tier], pages, 1)
            if self._copies:
                self._drop_copies(pages)
            idle = np.unique(pages[(in_pool[pages] == 0) & (self._frames[pages] != NOWHERE)])
            frames = self._frames[idle]
            self._frames[idle] = NOWHERE
            self._free.extend(frames[::-1].tolist())
            nobodys = (in_pool[pages] == 0) & (in_host[pages] == 0)
            gone = np.unique(pages[nobodys & (self._filled[pages] != FREE)])
            self._filled[gone] = FREE
            self._free_ids.extend(gone[::-1].tolist())
            return len(idle)

    def drop(self, pages: np.ndarray, tier: str) -> None:
        """`release` for finalizers, which may run anywhere: never waits for a lock that another thread holds."""
        self._dropped.append((pages, tier))
        if self.lock.acquire(blocking=False):
            try:
                self._settled()
            finally:
                self.lock.release()

    def _settled(self) -> None:
        """Remove all references that were dropped so far."""
        while self._dropped:
            with self.lock:
                try:
                    dropped = self._dropped.popleft()
                except IndexError:  # another thread took it
                    return
                self.release(*dropped)

    def _drop_copies(self, pages: np.ndarray) -> None:
        """Drop copies that no reference needs. If a copy is the only one left, its `stop` becomes the fill level."""
        in_pool, in_host = self._references[POOL], self._references[HOST]
        for page in np.unique(pages).tolist():
            copy = self._copies.get(page)
            if copy is None:
                continue
            if not in_host[page] and (not in_pool[page] or self._frames[page] != NOWHERE):
                self._copies.pop(page, None)
            elif not in_pool[page]:
                self._filled[page] = copy.stop

    def claim(self, page: int, start: int, stop: int) -> bool:
        """Take slots [start, stop) of a page for writing. Returns False if slot `start` is already claimed."""
        with self.lock:
            if self._filled[page] != start:
                return False
            self._filled[page] = stop
            return True

    def unclaim(self, page: int, start: int) -> None:
        """Give back the slots from `start` on. They must be the last claimed, and in no value."""
        with self.lock:
            self._filled[page] = start

    # Where pages are -------------------------------------------------------------------------------------------

    def frame(self, page: int) -> int:
        """The frame of a page; NOWHERE if it is not in the pool."""
        return int(self._frames[page])

    def frames(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Span tables of open writers as a step reads them: [P, 4] int32 each, with frames instead of page ids.

        They are valid until one of the writers is closed.
        """
        if not tables:
            return []
        spans = np.concatenate(tables)
        frames = self._frames[spans[:, PAGE]]
        assert not len(frames) or frames.min() >= 0, "a step reads pages that have left the pool"
        spans[:, PAGE] = frames
        stops = accumulate(map(len, tables))
        return [spans[stop - len(table) : stop] for table, stop in zip(tables, stops, strict=True)]

    def bring(self, pages: np.ndarray, stops: np.ndarray, tier: str) -> None:
        """Add one reference in a tier to each of these distinct pages, and move their slots before `stops` there.

        Pages that are already there are not moved again. On OutOfPages nothing has changed.
        """
        self.retain(pages, tier)
        try:
            if tier == POOL:
                self.fetch(pages)
            else:
                with self.lock:
                    for page, stop in zip(pages.tolist(), stops.tolist(), strict=True):
                        self._copy_out(page, stop)
        except BaseException:
            self.release(pages, tier)
            raise

    def fetch(self, pages: np.ndarray) -> None:
        """Bring spilled pages back into frames. On OutOfPages nothing has changed."""
        if (self._frames[pages] != NOWHERE).all():
            return
        with self.lock:
            absent = np.unique(pages[self._frames[pages] == NOWHERE])
            frames = self._take_frames(len(absent))  # may evict prefixes, but only pages that nothing else holds
            for page, frame in zip(absent.tolist(), frames, strict=True):
                self.memory.write_page(frame, self.page(page))
                self._frames[page] = frame
            self._drop_copies(absent)

    def spill(self, pages: np.ndarray) -> int:
        """Move pages to the host tier, except those of open writers. Returns the number of frames freed.

        Holders need not know: `read` finds pages in either tier, and a writer brings them back. Raises OutOfPages if
        the host has no more memory; pages moved before that stay moved.
        """
        count = 0
        with self.lock:
            holders = [pin() for pin in list(self._pins.values())]
            kept = {page for one in holders if one is not None for page in one.table[:, PAGE].tolist()}
            for page in np.unique(pages).tolist():
                if page in kept or not self._references[POOL][page] or self._frames[page] == NOWHERE:
                    continue
                own = np.array([page])
                self.retain(own)  # garbage collection during the copy may drop the last value that holds it
                try:
                    self._copy_out(page, int(self._filled[page]))
                    self._free.append(int(self._frames[page]))
                    self._frames[page] = NOWHERE
                    count += 1
                finally:
                    self.release(own)
        return count

    def _copy_out(self, page: int, stop: int) -> None:
        copy = self._copies.get(page) or self._blank_copy()
        if copy.stop < stop:
            copy.memory.write_page(0, self.page(page))
            copy.stop, self._copies[page] = stop, copy

    def _place(self, page: int) -> tuple[Memory, int]:
        """The memory that holds a page, and the frame in it."""
        with self.lock:
            frame = self.frame(page)
            return (self.memory, frame) if frame != NOWHERE else (self._copies[page].memory, 0)

    def pin(self, holder: Holder) -> None:
        """Keep the holder's pages where they are, until `unpin`. Its table may grow meanwhile."""
        with self.lock:
            self._pins[id(holder)] = weakref.ref(holder)

    def unpin(self, holder: Holder) -> None:
        self._pins.pop(id(holder), None)  # atomic: finalizers call this, and must not wait

    @contextmanager
    def pinned(self, table: np.ndarray) -> Generator[None]:
        """Keep the pages of a span table where they are, while their bytes are read."""
        pin = Pin(table)
        self.pin(pin)
        try:
            yield
        finally:
            self.unpin(pin)

    def page(self, page: int) -> memoryview:
        """The bytes of a page in either tier. Read-only; unclaimed slots may hold anything. See `pinned`."""
        memory, frame = self._place(page)
        return memory.read_pages([frame])[0]
