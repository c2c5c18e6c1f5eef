"""Copies of pages outside of the pool. A copy never changes, and goes when nobody holds the object any more.

So who reads a copy needs no lock: holding it is enough. Its finalizer never waits.
"""

from typing import Protocol

import numpy as np

from twostroke.errors import OutOfPages
from twostroke.kv.tiers.private_pages import PrivatePages
from twostroke.system.slab import Slots


class Copy(Protocol):
    """A copy of a page, valid in its slots before `stop`."""

    stop: int

    def read(self, into: memoryview) -> None:
        """Copy all bytes of the page to `into`. Raises PageLost."""
        ...


class HostCopy:
    """A copy in the host's ordinary memory."""

    def __init__(self, slots: Slots) -> None:
        """Take memory; the caller holds the pool's lock. Raises OutOfPages."""
        self.stop, self._slots = 0, slots
        try:
            self._slot = slots.take()
        except MemoryError:
            raise OutOfPages("there is no memory for another page in the host tier: drop values in it") from None

    def __del__(self) -> None:
        if hasattr(self, "_slot"):
            self._slots.give_back(self._slot)

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
