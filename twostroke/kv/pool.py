"""The contents of KV pages: moved as whole pages, read and written entry by entry."""

from collections.abc import Callable

import numpy as np

from twostroke.backends.memory import HostMemory, Layout, Memory
from twostroke.kv.geometry import Geometry
from twostroke.kv.pages import NOWHERE, Pages


class PagePool(Pages):
    """All pages of one geometry on one device.

    Attributes:
        entry_bytes, page_bytes: bytes of an entry, and of a page of `page_size` entries.
        wipes: whether writers zero fresh pages, since a model has written NaN: kernels multiply the slots of a page that
            a sequence does not use by 0, and 0 times NaN is NaN.
    """

    wipes = False

    def __init__(self, geometry: Geometry, memory: Memory, num_pages: int, page_size: int = 16) -> None:
        """`memory` must have room for `num_pages` pages of the geometry, each of `page_size` entries."""
        super().__init__(memory, num_pages)
        self.geometry, self.page_size = geometry, page_size
        self.entry_bytes = geometry.entry_bytes
        self.page_bytes = self.entry_bytes * page_size

    def _shape(self, frames: int) -> tuple[int, ...]:
        """Shape of the memory. All layers of a page are contiguous, so a page is touched and moved as one piece."""

        g = self.geometry
        return frames, g.num_layers, 2, g.num_kv_heads, self.page_size, g.head_dim

    def _blank(self) -> HostMemory:
        return self.loose_page(np.empty(self.page_bytes, np.uint8))

    def put(self, page: int, data: memoryview | bytes, stop: int) -> None:
        """Fill a fresh page with bytes and claim its slots before `stop`."""
        memory, frame = self._place(page)
        memory.write_page(frame, data)
        self._filled[page] = stop
        if copy := self._copies.get(page):
            copy.stop = stop

    def copy_page(self, source: int, target: int, stop: int) -> None:
        """Copy a page into a fresh one and claim its slots before `stop`. Both must be in the pool."""
        self.memory.copy_page(self.frame(source), self.frame(target))
        self._filled[target] = stop

    def joined(self, left: int, right: int, at: int, stop: int, tier: str) -> int:
        """A fresh page with one reference: slots [0, at) of `left` and [at, stop) of `right`."""
        slots = np.arange(at, stop)
        (page,) = self.allocate(1, tier)
        try:
            self.put(page, self.page(left), stop)
            self.write(np.full_like(slots, page), slots, self.read(np.full_like(slots, right), slots))
        except BaseException:
            self.release(np.array([page]), tier)
            raise
        return page

    def part(self, page: int, slots: np.ndarray) -> memoryview:
        """The bytes of a page, with zeros in all other slots."""
        alone = self.loose_page(np.zeros(self.page_bytes, np.uint8))
        alone.write(np.zeros_like(slots), slots, self.read(np.full_like(slots, page), slots))
        return alone.read_pages([0])[0]

    def loose_page(self, data: np.ndarray, layout: Layout | None = None) -> HostMemory:
        """The bytes of one page as memory of one frame, in the pool's layout unless a layout is given."""
        return HostMemory(self._shape(1), self.geometry.dtype, layout or self.memory.layout, data)

    def read(self, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather entries: [layers, 2, n, Hkv, D], a copy."""
        return self._gather(pages, slots, lambda memory, *at: memory.read(*at), 2)

    def read_keys(self, layer: int, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather one layer's keys: [n, Hkv, D], a copy."""
        return self._gather(pages, slots, lambda memory, *at: memory.read_keys(layer, *at), 0)

    def _gather(self, pages: np.ndarray, slots: np.ndarray, read: Callable[..., np.ndarray], axis: int) -> np.ndarray:
        """Apply `read(memory, frames, slots)` in each memory that holds pages, and merge the entries along `axis`."""
        with self.lock:  # no page may move meanwhile
            return self._merge(pages, slots, read, axis)

    def _merge(self, pages: np.ndarray, slots: np.ndarray, read: Callable[..., np.ndarray], axis: int) -> np.ndarray:
        frames = self._frames[pages]
        here = frames != NOWHERE
        if here.all():
            return read(self.memory, frames, slots)
        parts, places = [read(self.memory, frames[here], slots[here])], [np.flatnonzero(here)]
        for page in np.unique(pages[~here]).tolist():
            where = np.flatnonzero(pages == page)
            parts.append(read(self._copies[page].memory, np.zeros_like(where), slots[where]))
            places.append(where)
        bits = np.concatenate([part.view(f"u{part.itemsize}") for part in parts], axis)
        return bits.take(np.argsort(np.concatenate(places)), axis).view(parts[0].dtype)

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        """Scatter entries, the inverse of `read`."""
        here = self._frames[pages] != NOWHERE
        if here.all():
            self.memory.write(self._frames[pages], slots, entries)
            return
        for page in np.unique(pages).tolist():
            mine, (memory, frame) = pages == page, self._place(page)
            memory.write(np.full(np.count_nonzero(mine), frame), slots[mine], entries[:, :, mine])
