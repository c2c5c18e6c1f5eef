"""References to pages that end, and what becomes free with the last of them.

Finalizers give references back too. They may run anywhere, also in a thread that holds the lock, so they never wait:
what they drop is noted, and removed at once if the lock is free, else by the thread that holds it.
"""

import threading
from collections import deque

import numpy as np

from twostroke.kv.page_copies import PageCopies
from twostroke.kv.pages import HOST, NOWHERE, POOL, TIERS, Frames, ReferenceCounts, distinct
from twostroke.system.interrupts import DeferredInterrupts


class Releases:
    """The pool's lock, and all that removes references under it."""

    def __init__(self, references: ReferenceCounts, frames: Frames, copies: PageCopies) -> None:
        self._references, self._frames, self._copies = references, frames, copies
        self._dropped: deque[tuple[np.ndarray, str]] = deque()  # references to remove once the lock is free
        self._settling = False  # the thread that holds the lock is removing references
        # Garbage collection may drop values in a thread that holds the lock: so the lock is reentrant.
        self.lock = threading.RLock()

    def release(self, pages: np.ndarray, tier: str = POOL) -> int:
        """Remove one reference for every occurrence, and free pages without references. Returns frames freed.

        The garbage collector may drop another value between any two lines here. Its references are removed afterwards.
        """
        if not len(pages):
            return 0
        with DeferredInterrupts(), self.lock:
            outer, self._settling = self._settling, True
            try:
                freed = self._remove(pages, tier)
            finally:
                self._settling = outer
            self._settle()
            return freed

    def drop(self, pages: np.ndarray, tier: str) -> None:
        """`release` for finalizers, which may run anywhere: never waits for a lock that another thread holds."""
        if not len(pages):
            return
        with DeferredInterrupts():  # nothing may come between taking the lock and `try`
            self._dropped.append((pages, tier))
            if self.lock.acquire(blocking=False):
                try:
                    self._settle()
                finally:
                    self.lock.release()

    def settle(self) -> None:
        """Remove all references that were dropped so far."""
        if self._dropped:
            with DeferredInterrupts(), self.lock:
                self._settle()

    def _settle(self) -> None:
        """`settle` for those who hold the lock and have postponed Ctrl-C."""
        if self._settling:  # in a finalizer, in the midst of a release by this thread, which does this at its end
            return
        self._settling = True
        try:
            while self._dropped:
                self._remove(*self._dropped.popleft())
        finally:
            self._settling = False

    def _remove(self, pages: np.ndarray, tier: str) -> int:
        """`release` for those who hold the lock and settle what was dropped meanwhile."""
        references = self._references
        references.subtract(pages, tier)
        if copied := bool(self._copies):
            self.drop_unneeded_copies(pages)
        if not copied and np.count_nonzero(references.in_pool[pages]) == len(pages):  # held by others, as most are
            return 0
        idle = distinct(pages[(references.in_pool[pages] == 0) & ~self._frames.absent(pages)])
        if len(idle):
            self._frames.vacate(idle)
        references.free_unused_ids(pages)
        return len(idle)

    def drop_unneeded_copies(self, pages: np.ndarray) -> None:
        """Drop copies that no reference needs. Outside of the pool the fullest copy says how many slots are claimed.

        The lock must be held.
        """
        references = self._references
        for page in distinct(pages).tolist():
            in_pool = references.in_pool[page]
            spilled = in_pool and self._frames.of_page[page] == NOWHERE
            needed = [tier for tier in TIERS if references.of_tier(tier)[page] or (spilled and tier == HOST)]
            if (stop := self._copies.keep_only(page, needed)) and not in_pool:
                references.claimed[page] = stop
