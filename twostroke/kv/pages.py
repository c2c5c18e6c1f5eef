"""Logical pages: reference counts, and where each page is.

Values, writers and prefix indexes hold page ids, and the pool knows where each page is. A page may be in a *frame* of
the pool's memory, where kernels read it, and in copies elsewhere: in the host's ordinary memory, on disk, in a remote
store. So a page can leave the pool and come back without any change to its holders (`kv.moves`).

These rules decide where a page is:

- A reference asks for a page in one tier. The last reference of `POOL` frees the frame, the last reference of another
  tier frees the copy there. The page's id is free when it has no reference at all.
- A page that was spilled has references of `POOL` and no frame; the host's copy then stays for them.
- Pages that an open writer holds stay in their frames. `frames` finds a frame for each of them.

The contents of a claimed slot never change, so a copy stays valid for the slots that it was made for. A frame holds
all claimed slots of its page. So a page comes back from its fullest copy, which may be that of a longer value; a value
is read where it is from any copy that has its slots.

Any thread may make, cut and drop values. `lock` guards the counts, the places of pages, and the prefix indexes.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.backends.page_memory import Memory
from twostroke.errors import OutOfPages
from twostroke.kv.page_copies import Copy
from twostroke.system.interrupts import Postponed
from twostroke.system.slab import Slots

TIERS: tuple[str, ...] = ("pool", "host", "disk", "remote")  # what a reference can ask for, nearest first
POOL, HOST, DISK, REMOTE = TIERS
FREE = -1  # fill level of a page without references
NOWHERE = -1  # frame of a page that is not in the pool
LOCKED_BYTES = 1 << 20  # bytes that may be copied while the lock is held
LET_OTHERS_S = 1e-4  # pause after which a thread that waits for the lock has it


class Holder(Protocol):
    """An open writer, or something else that needs its pages where they are."""

    @property
    def table(self) -> np.ndarray: ...


class Pages:
    """All pages of a pool.

    Attributes:
        memory: the frames; num_pages: the number of frames.
        reclaim: called with the number of missing frames; may release some (prefix eviction).
        lock: held for every change of a count or a place, and across several changes that must agree.
        most_elsewhere: maximum number of pages that are not in frames.
        num_returning: number of pages that nobody wants, and that are free as soon as nothing can be written to them.
    """

    most_elsewhere = 1 << 20

    def __init__(self, memory: Memory, num_pages: int) -> None:
        self.memory, self.num_pages = memory, num_pages
        self.reclaim: Callable[[int], None] | None = None
        self._slots = Slots(memory.page_bytes)  # memory of the host tier
        self._reserved: set[int] = set()  # frames of pages that are on their way
        self.num_returning = 0
        self._settling = False  # the thread that holds the lock is removing references
        self._pins: dict[int, weakref.ref[Holder]] = {}  # those that need their pages in place, by id
        self._dropped: deque[tuple[np.ndarray, str]] = deque()  # references to remove once the lock is free
        most = num_pages + self.most_elsewhere  # untouched parts of these arrays take no memory
        self._counts = np.zeros((len(TIERS), most), np.int64)
        self._references = dict(zip(TIERS, self._counts, strict=True))
        self._filled = np.zeros(most, np.int64)  # claimed slots of each page, or FREE
        self._frames = np.zeros(most, np.int32)  # frame of each page, or NOWHERE
        self._copies: dict[str, dict[int, Copy]] = {tier: {} for tier in TIERS if tier != POOL}
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
    def num_arriving(self) -> int:
        """Number of frames that are reserved for pages on their way into the pool."""
        return len(self._reserved)

    def copies(self, tier: str) -> int:
        """Number of pages with a copy in a tier other than the pool."""
        self._settled()
        return len(self._copies[tier])

    @property
    def num_copies(self) -> int:
        """Number of pages in the host tier, each of `page_bytes` bytes."""
        return self.copies(HOST)

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

    def num_freed(self, pages: np.ndarray) -> int:
        """Number of these distinct pages that `frees`."""
        return int(np.count_nonzero((self._references[POOL][pages] == 1) & (self._frames[pages] != NOWHERE)))

    # References ------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` empty pages with one reference each. On OutOfPages none is taken."""
        if not count:
            return []
        with self.lock:
            frames = self._take_frames(count)
            pages = self._new_ids(count)
            one = count == 1  # as for most decodes: a number is a quicker index than a list
            where = pages[0] if one else pages
            self._filled[where] = 0
            self._frames[where] = frames[0] if one else frames
            self._references[POOL][where] = 1
            return pages

    def _new_ids(self, count: int) -> list[int]:
        fresh = max(0, count - len(self._free_ids))
        if self._num_ids + fresh > len(self._frames):
            raise OutOfPages(f"{self.most_elsewhere:,} KV pages are outside of the pool: drop values")
        ids = [self._free_ids.pop() for _ in range(count - fresh)]
        ids += range(self._num_ids, self._num_ids + fresh)
        self._num_ids += fresh
        return ids

    def _take_frames(self, count: int) -> list[int]:
        self._settled()
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        if count > len(self._free):
            raise OutOfPages(
                f"{count} more KV pages are needed and {len(self._free)} of {self.num_pages} are free: drop "
                f"values that are no longer used, or give the pool more memory (kv_bytes)",
                count,
            )
        return [self._free.pop() for _ in range(count)]

    def make_room(self, count: int) -> None:
        """Let up to `count` frames become free before they are taken, for callers that do not hold the lock.

        Evicted pages may have to be copied. So a few go at a time, and others get the lock in between.
        """
        few = max(1, LOCKED_BYTES // self.memory.page_bytes)
        while (missing := count - self.num_free) > 0 and (reclaim := self.reclaim) is not None:
            with self.lock:
                before = self.num_free
                reclaim(min(few, missing))
                if self.num_free <= before:
                    return
            if missing > few:
                time.sleep(LET_OTHERS_S)

    def retain(self, pages: np.ndarray, tier: str = POOL) -> None:
        """Add one reference for every occurrence of a page, without moving it (see `moves`)."""
        if not len(pages):
            return
        with self.lock:
            np.add.at(self._references[tier], pages, 1)

    def release(self, pages: np.ndarray, tier: str = POOL) -> int:
        """Remove one reference for every occurrence, and free pages without references. Returns frames freed.

        The garbage collector may drop another value between any two lines here. Its references are removed afterwards.
        """
        if not len(pages):
            return 0
        with Postponed(), self.lock:
            outer, self._settling = self._settling, True
            try:
                freed = self._remove(pages, tier)
            finally:
                self._settling = outer
            self._settle()
            return freed

    def _remove(self, pages: np.ndarray, tier: str) -> int:
        """`release` for those who hold the lock and settle what was dropped meanwhile."""
        np.subtract.at(self._references[tier], pages, 1)
        if copied := any(self._copies.values()):
            self._drop_copies(pages)
        held = not copied and np.count_nonzero(self._references[POOL][pages]) == len(pages)  # by others, as most are
        return 0 if held else self._free_unheld(pages)

    def _free_unheld(self, pages: np.ndarray) -> int:
        """Free the frames and the ids that no reference needs. Returns the number of frames."""
        idle = _distinct(pages[(self._references[POOL][pages] == 0) & (self._frames[pages] != NOWHERE)])
        if len(idle):
            frames = self._frames[idle]
            self._frames[idle] = NOWHERE
            self._free.extend(frames[::-1].tolist())
        gone = _distinct(pages[~np.logical_or.reduce(self._counts[:, pages]) & (self._filled[pages] != FREE)])
        if len(gone):
            self._filled[gone] = FREE
            self._free_ids.extend(gone[::-1].tolist())
        return len(idle)

    def drop(self, pages: np.ndarray, tier: str) -> None:
        """`release` for finalizers, which may run anywhere: never waits for a lock that another thread holds."""
        if not len(pages):
            return
        with Postponed():  # nothing may come between taking the lock and `try`
            self._dropped.append((pages, tier))
            if self.lock.acquire(blocking=False):
                try:
                    self._settle()
                finally:
                    self.lock.release()

    def _settled(self) -> None:
        """Remove all references that were dropped so far."""
        if self._dropped:
            with Postponed(), self.lock:
                self._settle()

    def _settle(self) -> None:
        """`_settled` for those who hold the lock and have postponed Ctrl-C."""
        if self._settling:  # in a finalizer, in the midst of a release by this thread, which does this at its end
            return
        self._settling = True
        try:
            while self._dropped:
                self._remove(*self._dropped.popleft())
        finally:
            self._settling = False

    def _drop_copies(self, pages: np.ndarray) -> None:
        """Drop copies that no reference needs. Outside of the pool the fullest copy says how many slots are claimed."""
        in_pool = self._references[POOL]
        for page in _distinct(pages).tolist():
            left = 0
            for tier, copies in self._copies.items():
                if (copy := copies.get(page)) is None:
                    continue
                spilled = tier == HOST and in_pool[page] and self._frames[page] == NOWHERE
                if self._references[tier][page] or spilled:
                    left = max(left, copy.stop)
                else:
                    del copies[page]
            if left and not in_pool[page]:
                self._filled[page] = left

    def claim(self, page: int, start: int, stop: int) -> bool:
        """Take slots [start, stop) of a page for writing. Returns False if slot `start` is already claimed."""
        with self.lock:
            if self._filled[page] != start:
                return False
            self._filled[page] = stop
            return True

    def claim_fresh(self, pages: Sequence[int], stops: np.ndarray) -> None:
        """Take the slots before `stops` of pages in which none is claimed, and which nobody else knows."""
        self._filled[pages] = stops

    def filled(self, page: int) -> int:
        """Claimed slots of a page."""
        return int(self._filled[page])

    def unclaim(self, page: int, start: int) -> None:
        """Give back the slots from `start` on. They must be the last claimed, and in no value."""
        with self.lock:
            self._filled[page] = start

    # Where pages are -------------------------------------------------------------------------------------------

    def frame(self, page: int) -> int:
        """The frame of a page; NOWHERE if it is not in the pool."""
        return int(self._frames[page])

    def frames_of(self, pages: Sequence[int] | np.ndarray) -> np.ndarray:
        """The frame of each page, [n] int32."""
        return self._frames[pages]

    def all_frames(self) -> np.ndarray:
        """[ids] int32: the frame of each page id that was ever used, a copy. The lock must be held."""
        return self._frames[: self._num_ids].copy()

    def arriving_frames(self) -> list[int]:
        """The frames that are reserved for pages on their way into the pool. The lock must be held."""
        return list(self._reserved)

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

    def _kept(self) -> set[int]:
        """The pages that stay in their frames."""
        holders = [pin() for pin in list(self._pins.values())]
        return {page for one in holders if one is not None for page in one.table[:, PAGE].tolist()}

    def pin(self, holder: Holder) -> None:
        """Keep the holder's pages where they are, until `unpin`. Its table may grow meanwhile."""
        with self.lock:
            self._pins[id(holder)] = weakref.ref(holder)

    def unpin(self, holder: Holder) -> None:
        self._pins.pop(id(holder), None)  # atomic: finalizers call this, and must not wait


def _distinct(pages: np.ndarray) -> np.ndarray:
    """Each page once, in ascending order. `np.unique` imports modules, which a finalizer at Python's end cannot; so do
    methods of arrays such as `any`."""
    if len(pages) < 2:
        return pages
    ordered = np.sort(pages)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
