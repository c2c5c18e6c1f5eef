"""Pages by name: who holds them, and where they are.

A page is a name, not a place: values, writers and prefix indexes hold page ids, and the pool knows where each page is.
It may be in a *frame* of the pool's memory, where kernels read it; it may be a copy in the host's ordinary memory; or
both. So a page can leave the pool and come back, and nobody who holds it is told.

Who decides where a page is:

- A reference asks for a page to be in one tier: `POOL` or `HOST`. A frame is given up with the last reference of
  `POOL`, a copy with the last reference of `HOST`. The page's id is free when nobody refers to it at all.
- `spill` takes frames away from pages that are still referred to, whose only copy is then the host's. `fetch` brings
  them back.
- What an open writer holds stays in its frame. So `fetch` when a writer opens is all that a step needs: `frames` then
  finds a frame for every page of it.

What is in a claimed slot never changes, so a copy stays right for the slots that it was made for.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.backends.memory import HostMemory, Memory
from twostroke.errors import OutOfPages

POOL, HOST = "pool", "host"  # the tiers that a reference can ask for
FREE = -1  # how far a page that is nobody's is filled
NOWHERE = -1  # the frame of a page that is not in the pool
MOST_COPIES = 1 << 20  # pages without a frame


class Holder(Protocol):
    """An open writer."""

    @property
    def table(self) -> np.ndarray: ...


@dataclass
class HostCopy:
    """A page in the host's ordinary memory, of one frame, right in its slots before `stop`."""

    memory: HostMemory
    stop: int = 0


class Pages(ABC):
    """All pages of a pool.

    Attributes:
        memory: the frames; num_pages: how many there are.
        reclaim: called with a number of frames when none is free; may release some (prefix eviction).
        writers: those that are open; pages they hold are not spilled.
    """

    def __init__(self, memory: Memory, num_pages: int) -> None:
        self.memory, self.num_pages = memory, num_pages
        self.reclaim: Callable[[int], None] | None = None
        self.writers: WeakSet[Holder] = WeakSet()
        most = num_pages + MOST_COPIES  # what is not touched takes no memory
        self._references = {POOL: np.zeros(most, np.int64), HOST: np.zeros(most, np.int64)}
        self._filled = np.zeros(most, np.int64)  # slots of each page that somebody has claimed; else FREE
        self._frames = np.zeros(most, np.int32)  # or NOWHERE
        self._copies: dict[int, HostCopy] = {}
        self._free = list(range(num_pages - 1, -1, -1))  # frames
        self._free_ids: list[int] = []
        self._num_ids = 0  # used so far
        # Values are released by whichever thread drops them, garbage collection included: hence reentrant.
        self._lock = threading.RLock()

    # Facts -----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Frames that hold no page."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Frames that hold one."""
        return self.num_pages - len(self._free)

    @property
    def num_copies(self) -> int:
        """Pages in the host tier, each of `page_bytes`."""
        return len(self._copies)

    @property
    def num_held(self) -> int:
        """Pages that somebody refers to, wherever they are."""
        return self._num_ids - len(self._free_ids)

    def references(self, page: int, tier: str = POOL) -> int:
        return int(self._references[tier][page])

    def frees(self, page: int) -> bool:
        """Whether giving up one reference of `POOL` would free a frame."""
        return bool(self._references[POOL][page] == 1 and self._frames[page] != NOWHERE)

    # References ------------------------------------------------------------------------------------------------

    def allocate(self, count: int, tier: str = POOL) -> list[int]:
        """`count` empty pages with one reference each. Raises OutOfPages, having taken none."""
        if not count:
            return []
        copies = [self._blank_copy() for _ in range(count if tier == HOST else 0)]
        frames = self._take_frames(count if tier == POOL else 0)
        with self._lock:
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
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        with self._lock:
            if count > len(self._free):
                raise OutOfPages(
                    f"{count} more KV pages are needed and {len(self._free)} of {self.num_pages} are free: drop "
                    f"values that are no longer used, or give the pool more memory (kv_bytes)"
                )
            return [self._free.pop() for _ in range(count)]

    def _blank_copy(self) -> HostCopy:
        if len(self._copies) >= MOST_COPIES:
            raise OutOfPages(f"the host tier holds {MOST_COPIES:,} pages, as many as it can: drop values in it")
        try:
            return HostCopy(self._blank())
        except MemoryError:
            raise OutOfPages("there is no memory for another page in the host tier: drop values in it") from None

    @abstractmethod
    def _blank(self) -> HostMemory:
        """Memory of one frame in the layout of the pool's, which may hold anything."""

    def retain(self, pages: np.ndarray, tier: str = POOL) -> None:
        """One more reference for every occurrence of a page. It is where it is: see `bring` and `fetch`."""
        with self._lock:
            np.add.at(self._references[tier], pages, 1)

    def release(self, pages: np.ndarray, tier: str = POOL) -> int:
        """One reference less for every occurrence, and no room for what nobody refers to. Returns frames freed.

        The garbage collector may drop another value between any two lines here, and free some of these pages. What has
        no reference left is nobody else's to give up, so each step looks at what is still there.
        """
        in_pool, in_host = self._references[POOL], self._references[HOST]
        with self._lock:
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

    def _drop_copies(self, pages: np.ndarray) -> None:
        """Forget copies that nobody asks for; where one becomes all there is, nobody uses the slots it has not."""
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

    # Where pages are -------------------------------------------------------------------------------------------

    def frame(self, page: int) -> int:
        """Where a page of an open writer is."""
        return int(self._frames[page])

    def frames(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Span tables of open writers as a step reads them: [P, 4] int32 each, with frames in place of pages.

        They are right until one of the writers is closed.
        """
        if not tables:
            return []
        spans = np.concatenate(tables)
        frames = self._frames[spans[:, PAGE]]
        assert not len(frames) or frames.min() >= 0, "a step reads pages that have left the pool"
        spans[:, PAGE] = frames
        stops = np.cumsum([len(table) for table in tables])
        return [spans[stop - len(table) : stop] for table, stop in zip(tables, stops.tolist(), strict=True)]

    def bring(self, pages: np.ndarray, stops: np.ndarray, tier: str) -> None:
        """One more reference to each of these distinct pages, in a tier, where their slots before `stops` come to be.

        What is there already is not moved again. Raises OutOfPages with nothing changed.
        """
        self.retain(pages, tier)
        try:
            if tier == POOL:
                self.fetch(pages)
            else:
                with self._lock:
                    for page, stop in zip(pages.tolist(), stops.tolist(), strict=True):
                        self._copy_out(page, stop)
        except BaseException:
            self.release(pages, tier)
            raise

    def fetch(self, pages: np.ndarray) -> None:
        """Bring back what was spilled of these pages. Raises OutOfPages with nothing changed."""
        absent = np.unique(pages[self._frames[pages] == NOWHERE])
        if not len(absent):
            return
        frames = self._take_frames(len(absent))  # may evict prefixes, but no page that somebody else holds
        with self._lock:
            for page, frame in zip(absent.tolist(), frames, strict=True):
                self.memory.write_page(frame, self.page(page))
                self._frames[page] = frame
            self._drop_copies(absent)

    def spill(self, pages: np.ndarray) -> int:
        """Move pages to the host tier, all but those of open writers. Returns how many frames are free for it.

        Who holds them is not told: `read` finds them where they are, and a writer brings them back. Raises OutOfPages
        where the host has no more memory; what was moved before is moved.
        """
        kept = {page for writer in list(self.writers) for page in writer.table[:, PAGE].tolist()}
        count = 0
        with self._lock:
            for page in np.unique(pages).tolist():
                if page not in kept and self._references[POOL][page] and self._frames[page] != NOWHERE:
                    self._copy_out(page, int(self._filled[page]))
                    frame, self._frames[page] = int(self._frames[page]), NOWHERE
                    self._free.append(frame)
                    count += 1
        return count

    def _copy_out(self, page: int, stop: int) -> None:
        copy = self._copies.get(page) or self._blank_copy()
        if copy.stop < stop:
            copy.memory.write_page(0, self.page(page))
            copy.stop, self._copies[page] = stop, copy

    def _place(self, page: int) -> tuple[Memory, int]:
        """The memory that a page is in, and its frame there."""
        frame = self.frame(page)
        return (self.memory, frame) if frame != NOWHERE else (self._copies[page].memory, 0)

    def page(self, page: int) -> memoryview:
        """The bytes of a page wherever it is, not to be written to; slots that nobody claimed may hold anything."""
        memory, frame = self._place(page)
        return memory.read_pages([frame])[0]
