"""Copies of pages outside of the pool. A copy never changes, and goes when nobody holds the object any more.

So reading a copy needs no lock: holding it is enough. Its finalizer never waits.
"""

from collections.abc import Container
from typing import Protocol

import numpy as np

from twostroke.errors import OutOfPages, PageLost
from twostroke.kv.pages import POOL, TIERS
from twostroke.kv.tiers.private_pages import PrivatePages
from twostroke.system.slab import SlabAllocator


class PageCopy(Protocol):
    """A copy of a page, valid in its slots before `stop`."""

    stop: int

    def read(self, into: memoryview) -> None:
        """Copy all bytes of the page to `into`. Raises PageLost."""
        ...


class HostCopy:
    """A copy in the host's ordinary memory."""

    def __init__(self, slots: SlabAllocator) -> None:
        """Take memory; the caller holds the pool's lock. Raises OutOfPages."""
        self.stop, self._slots = 0, slots
        try:
            self._slot = slots.allocate()
        except MemoryError:
            raise OutOfPages("there is no memory for another page in the host tier: drop values in it") from None

    def __del__(self) -> None:
        if hasattr(self, "_slot"):
            self._slots.free(self._slot)

    def fill(self, data: memoryview, stop: int) -> None:
        """Write all bytes of the page, before the copy is used."""
        self._slots.view(self._slot)[:] = np.frombuffer(data, np.uint8)
        self.stop = stop

    def read(self, into: memoryview) -> None:
        np.frombuffer(into, np.uint8)[:] = self._slots.view(self._slot)


class StoredCopy:
    """A private page of a store."""

    def __init__(self, pages: PrivatePages, data: memoryview, stop: int) -> None:
        """Write it. Raises OutOfPages."""
        self.stop, self._pages = stop, pages
        self._name = pages.keep(data)

    def __del__(self) -> None:
        if hasattr(self, "_name"):
            self._pages.forget(self._name)

    def read(self, into: memoryview) -> None:
        self._pages.fetch(self._name, into)


class PageCopies:
    """The copies of a pool's pages, by tier. The pool's lock guards every change.

    The contents of a claimed slot never change, so a copy stays valid for the slots that it was made for.
    """

    def __init__(self, page_bytes: int) -> None:
        self._in_tier: dict[str, dict[int, PageCopy]] = {tier: {} for tier in TIERS if tier != POOL}
        self._host_slots = SlabAllocator(page_bytes)

    def __bool__(self) -> bool:
        return any(self._in_tier.values())

    @property
    def num_host_slots(self) -> int:
        """Number of pages of ordinary memory that are taken, also by copies that are not kept here yet."""
        return self._host_slots.num_used

    def in_tier(self, tier: str) -> dict[int, PageCopy]:
        return self._in_tier[tier]

    def new_host_copies(self, count: int) -> list[HostCopy]:
        """Ordinary memory for copies that are filled and kept later. Raises OutOfPages."""
        return [HostCopy(self._host_slots) for _ in range(count)]

    def holds(self, page: int, stop: int, tier: str) -> bool:
        """Whether a tier has a copy of the page's slots before `stop`."""
        copy = self._in_tier[tier].get(page)
        return copy is not None and copy.stop >= stop

    def keep(self, page: int, copy: PageCopy, tier: str) -> None:
        """Keep a copy in a tier, unless one of as many slots is there."""
        if not self.holds(page, copy.stop, tier):
            self._in_tier[tier][page] = copy

    def fullest(self, page: int) -> tuple[str, PageCopy]:
        """The tier and the copy with the most slots, of several the nearest. Raises PageLost.

        A frame must hold all claimed slots, so this is what comes back into one. It may be a longer value's copy.
        """
        found = [(tier, copies[page]) for tier, copies in self._in_tier.items() if page in copies]
        if not found:
            raise page_lost(page)
        return max(found, key=lambda one: one[1].stop)

    def nearest(self, page: int, stop: int) -> PageCopy:
        """The nearest copy that has the slots before `stop`. Raises PageLost."""
        copies = (copies[page] for copies in self._in_tier.values() if page in copies)
        if (copy := next((copy for copy in copies if copy.stop >= stop), None)) is None:
            raise page_lost(page)
        return copy

    def keep_only(self, page: int, tiers: Container[str]) -> int:
        """Drop the page's copies in other tiers. Returns the number of slots of the fullest copy that stays, or 0."""
        fullest = 0
        for tier, copies in self._in_tier.items():
            if (copy := copies.get(page)) is not None:
                if tier in tiers:
                    fullest = max(fullest, copy.stop)
                else:
                    del copies[page]
        return fullest


def page_lost(page: int) -> PageLost:
    return PageLost(f"page {page} of this value is in no tier any more: compute the value again")
