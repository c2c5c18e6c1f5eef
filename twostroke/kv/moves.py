"""Pages move between tiers: out to copies, back into frames, and aside when the pool is full.

The pool's lock is held for the books only, never while bytes are copied, written or read.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from twostroke.backends.page_memory import PageMemory
from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv.page_copies import HostCopy, PageCopy, StoredCopy
from twostroke.kv.pages import DISK, HOST, NOWHERE, POOL, REMOTE, TIERS, Pages
from twostroke.kv.swap_in import SwapIn, page_lost
from twostroke.kv.tiers.names import Namespace
from twostroke.kv.tiers.private_pages import PrivatePages
from twostroke.kv.tiers.store import Store

BATCH = 16  # pages that `spill` has in flight
HOW = {DISK: "kv_disk=DIRECTORY", REMOTE: "kv_remote=URL"}


@dataclass(frozen=True, eq=False)
class Pin:
    """Keeps pages in their frames while they are read."""

    table: np.ndarray


@dataclass(frozen=True)
class PageSource:
    """Where a page is read: in a frame, or from a copy."""

    memory: PageMemory
    frame: int
    copy: PageCopy | None

    def data(self) -> memoryview:
        """All bytes of the page, read-only. Raises PageLost."""
        if self.copy is None:
            return self.memory.read_pages([self.frame])[0]
        data = np.empty(self.memory.page_bytes, np.uint8)
        self.copy.read(data.data)
        return data.data.toreadonly()


class Moves(Pages):
    """Pages that can be in several tiers.

    Attributes:
        stores: the stores of the tiers "disk" and "remote", if there are any.
    """

    def __init__(self, memory: PageMemory, num_pages: int) -> None:
        super().__init__(memory, num_pages)
        self.stores: dict[str, Store] = {}
        self._private: dict[str, PrivatePages] = {}

    @property
    def namespace(self) -> Namespace:
        """What private pages of this pool have in common."""
        raise NotImplementedError

    def part(self, data: memoryview, slots: np.ndarray) -> memoryview:
        """The bytes of a page with zeros in all other slots."""
        raise NotImplementedError

    def require(self, tier: str) -> None:
        """Raise KVError if there is no such tier."""
        if tier not in TIERS:
            raise KVError(f"the tier {tier!r} is unknown: use {', '.join(TIERS[:-1])} or {TIERS[-1]}")
        if tier in HOW and tier not in self.stores:
            raise KVError(f"there is no {tier} tier: open the model with {HOW[tier]}")

    # Reading ---------------------------------------------------------------------------------------------------

    def _fullest(self, page: int) -> tuple[str, PageCopy]:
        """The copy with the most slots, of several the nearest. A frame must hold all claimed slots."""
        found = [(tier, copies[page]) for tier, copies in self._copies.items() if page in copies]
        if not found:
            raise page_lost(page)
        return max(found, key=lambda one: one[1].stop)

    def _source(self, page: int, stop: int) -> PageSource:
        if (frame := self.frame(page)) != NOWHERE:
            return PageSource(self.memory, frame, None)
        copies = (copies[page] for copies in self._copies.values() if page in copies)
        if (copy := next((copy for copy in copies if copy.stop >= stop), None)) is None:
            raise page_lost(page)
        return PageSource(self.memory, NOWHERE, copy)

    @contextmanager
    def reading(self, pages: np.ndarray, stops: np.ndarray) -> Generator[list[PageSource]]:
        """Where to read the slots before `stops` of distinct pages. All stay there meanwhile."""
        pin = Pin(spans.pages_only(pages))
        with self.lock:
            sources = [self._source(*one) for one in zip(pages.tolist(), stops.tolist(), strict=True)]
            held = pages[[source.copy is None for source in sources]]
            self.retain(held)
            self.pin(pin)
        try:
            yield sources
        finally:
            self.unpin(pin)
            self.release(held)

    # Out -------------------------------------------------------------------------------------------------------

    def bring(self, pages: np.ndarray, stops: np.ndarray, tier: str) -> None:
        """Add one reference in a tier to each of these distinct pages, and copy their slots before `stops` there.

        Pages that are already there are not moved again. Raises OutOfPages, PageLost or KVError: nothing has changed.
        """
        self.require(tier)
        if tier == POOL:
            with SwapIn(self, pages) as arrival:
                arrival.load()
                arrival.publish()
                self.retain(pages)
            return
        self.retain(pages, tier)
        try:
            self._send(pages, stops, tier)
        except BaseException:
            self.release(pages, tier)
            raise

    def _send(self, pages: np.ndarray, stops: np.ndarray, tier: str) -> None:
        with self.lock:
            there = self._copies[tier]
            short = [
                page not in there or there[page].stop < stop
                for page, stop in zip(pages.tolist(), stops.tolist(), strict=True)
            ]
            pages, stops = pages[short], stops[short]
            rooms = [HostCopy(self._slots) for _ in pages] if tier == HOST else []
        copies: list[PageCopy] = []
        with self.reading(pages, stops) as sources:
            for i, (source, stop) in enumerate(zip(sources, stops.tolist(), strict=True)):
                copies.append(self._copy(source.data(), stop, tier, rooms[i] if rooms else None))
        self._publish(pages.tolist(), copies, tier)

    def _copy(self, data: memoryview, stop: int, tier: str, room: HostCopy | None) -> PageCopy:
        if room is not None:
            room.fill(data, stop)
            return room
        # Slots after those of the value may be written meanwhile, and are nobody else's business.
        return StoredCopy(self._private_pages(tier), self.part(data, np.arange(stop)), stop)

    def _publish(self, pages: list[int], copies: list[PageCopy], tier: str) -> None:
        with self.lock:
            there = self._copies[tier]
            for page, copy in zip(pages, copies, strict=True):
                if page not in there or there[page].stop < copy.stop:
                    there[page] = copy

    def _private_pages(self, tier: str) -> PrivatePages:
        with self.lock:
            store, known = self.stores[tier], self._private.get(tier)
            if known is None or known.store is not store:
                known = self._private[tier] = PrivatePages(store, self.namespace)
            return known

    def created(self, data: memoryview, stop: int, tier: str) -> int:
        """A fresh page with these bytes, in a tier, with one reference and its slots before `stop` claimed.

        Raises OutOfPages.
        """
        if tier == POOL:
            (page,) = self.allocate(1)
            self.memory.write_page(self.frame(page), data)
            self._filled[page] = stop
            return page
        with self.lock:
            room = HostCopy(self._slots) if tier == HOST else None
        copy = self._copy(data, stop, tier, room)
        with self.lock:
            (page,) = self._new_ids(1)
            self._filled[page], self._frames[page] = stop, NOWHERE
            self._copies[tier][page] = copy
            self._references[tier][page] = 1
            return page

    # Back ------------------------------------------------------------------------------------------------------

    def arrival(self, pages: np.ndarray) -> SwapIn:
        """Reserve frames for those of these distinct pages that have none. Raises OutOfPages."""
        return SwapIn(self, pages)

    def fetch(self, pages: np.ndarray) -> None:
        """Bring spilled pages back into frames. Raises OutOfPages: nothing has changed."""
        if not np.count_nonzero(self._frames[pages] == NOWHERE):
            return
        with SwapIn(self, np.unique(pages)) as arrival:
            arrival.load()
            arrival.publish()

    # Aside -----------------------------------------------------------------------------------------------------

    def spill(self, pages: np.ndarray) -> int:
        """Move pages to the host tier, except those of open writers. Returns the number of frames freed.

        Holders need not know: a writer brings them back. Raises OutOfPages if there is no memory; pages moved before
        that stay moved.
        """
        pages, count = np.unique(pages), 0
        for first in range(0, len(pages), BATCH):
            count += self._spill(pages[first : first + BATCH])
        return count

    def _spill(self, pages: np.ndarray) -> int:
        host = self._copies[HOST]
        with self.lock:
            kept = self._kept()
            goes = (self._references[POOL][pages] > 0) & (self._frames[pages] != NOWHERE)
            pages = np.array([page for page in pages[goes].tolist() if page not in kept], np.int64)
            stops, frames = self._filled[pages].tolist(), self._frames[pages].tolist()
            # While these references are held, claimed slots stay claimed, and only an open writer claims more.
            self.retain(pages)
            pin = Pin(spans.pages_only(pages))
            self.pin(pin)
        try:
            with self.lock:
                todo = [
                    one
                    for one in zip(pages.tolist(), frames, stops, strict=True)
                    if one[0] not in host or host[one[0]].stop < one[2]
                ]
                rooms = [HostCopy(self._slots) for _ in todo]
            copied: dict[int, HostCopy] = {}
            for (page, frame, stop), room in zip(todo, rooms, strict=True):
                room.fill(self.memory.read_pages([frame])[0], stop)
                copied[page] = room
            with self.lock:
                self.unpin(pin)
                return self._set_aside(pages.tolist(), copied)
        finally:
            self.unpin(pin)
            self.release(pages)

    def _set_aside(self, pages: list[int], copied: dict[int, HostCopy]) -> int:
        """Free the frames of pages whose copies in the host hold all that is claimed by now."""
        count, kept, host = 0, self._kept(), self._copies[HOST]
        for page in pages:
            copy = copied.get(page) or host.get(page)
            unused = self._references[POOL][page] == 1  # only the mover holds it
            if copy is None or page in kept or unused or copy.stop < self._filled[page]:
                continue
            if page not in host or host[page].stop < copy.stop:
                host[page] = copy
            self._free.append(int(self._frames[page]))
            self._frames[page] = NOWHERE
            count += 1
        return count
