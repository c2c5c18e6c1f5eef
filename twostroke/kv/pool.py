"""The contents of KV pages: moved as whole pages, read and written entry by entry."""

from collections.abc import Callable

import numpy as np

from twostroke.backends.page_memory import HostMemory, Layout, PageMemory
from twostroke.kv.geometry import Geometry
from twostroke.kv.moves import Moves
from twostroke.kv.tiers.names import Namespace


class PagePool(Moves):
    """All pages of one geometry on one device.

    Attributes:
        entry_bytes, page_bytes: bytes of an entry, and of a page of `page_size` entries.
        wipes: whether writers zero fresh pages, since a model has written NaN: kernels multiply slots of a page that
            a sequence does not use by 0, and 0 times NaN is NaN.
    """

    wipes = False

    def __init__(self, geometry: Geometry, memory: PageMemory, num_pages: int, page_size: int = 16) -> None:
        """`memory` must have room for `num_pages` pages of the geometry, each of `page_size` entries."""
        super().__init__(memory, num_pages)
        self.geometry, self.page_size = geometry, page_size
        self.entry_bytes = geometry.entry_bytes
        self.page_bytes = self.entry_bytes * page_size

    def _shape(self, frames: int) -> tuple[int, ...]:
        """Shape of the memory. All layers of a page are contiguous, so a page is touched and moved as one piece."""

        g = self.geometry
        return frames, g.num_layers, 2, g.num_kv_heads, self.page_size, g.head_dim

    @property
    def namespace(self) -> Namespace:
        """What private pages of this pool have in common."""
        layout = self.memory.layout
        return Namespace("", "", self.geometry.fingerprint, layout, self.page_size, self.page_bytes)

    def put(self, page: int, data: memoryview | bytes, stop: int) -> None:
        """Fill a fresh page in the pool with bytes and claim its slots before `stop`."""
        self.memory.write_page(self.frame(page), data)
        self._filled[page] = stop

    def copy_page(self, source: int, target: int, stop: int) -> None:
        """Copy a page into a fresh one and claim its slots before `stop`. Both must be in the pool."""
        self.memory.copy_page(self.frame(source), self.frame(target))
        self._filled[target] = stop

    def joined(self, left: int, right: int, at: int, stop: int, tier: str) -> int:
        """A fresh page with one reference: slots [0, at) of `left` and [at, stop) of `right`."""
        data = np.empty(self.page_bytes, np.uint8)
        with self.reading(np.array([left, right]), np.array([at, stop])) as (one, other):
            data[:] = np.frombuffer(one.data(), np.uint8)
            theirs = self.loose_page(np.frombuffer(other.data(), np.uint8))
        slots = np.arange(at, stop)
        zeros = np.zeros_like(slots)
        self.loose_page(data).write(zeros, slots, theirs.read(zeros, slots))
        return self.created(data.data, stop, tier)

    def part(self, data: memoryview, slots: np.ndarray) -> memoryview:
        """The bytes of a page, with zeros in all other slots."""
        if len(slots) == self.page_size:
            return data
        alone = self.loose_page(np.zeros(self.page_bytes, np.uint8))
        zeros = np.zeros_like(slots)
        alone.write(zeros, slots, self.loose_page(np.frombuffer(data, np.uint8)).read(zeros, slots))
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
        distinct, owners = np.unique(pages, return_inverse=True)
        stops = np.zeros(len(distinct), np.int64)
        np.maximum.at(stops, owners, slots + 1)
        with self.reading(distinct, stops) as sources:
            frames = np.array([source.frame for source in sources], np.int64)
            here = np.array([source.copy is None for source in sources], bool)[owners]
            if here.all():
                return read(self.memory, frames[owners], slots)
            parts, places = [read(self.memory, frames[owners][here], slots[here])], [np.flatnonzero(here)]
            for i, source in enumerate(sources):
                if source.copy is not None:
                    where = np.flatnonzero(owners == i)
                    page = self.loose_page(np.frombuffer(source.data(), np.uint8))
                    parts.append(read(page, np.zeros_like(where), slots[where]))
                    places.append(where)
        bits = np.concatenate([part.view(f"u{part.itemsize}") for part in parts], axis)
        return bits.take(np.argsort(np.concatenate(places)), axis).view(parts[0].dtype)

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        """Scatter entries into pages in the pool, the inverse of `read`."""
        self.memory.write(self._frames[pages], slots, entries)
