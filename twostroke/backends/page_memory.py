"""The memory of a pool's pages: the interface, and its implementation in host memory.

A page holds K and V of `page_size` entries in the layers of one group (`models.layer_groups`), in one piece of
`page_bytes` bytes, as many for every group. It moves as these bytes: to another page, to a file, to another memory of
the same layout. Single entries are read and written only if a page is used in part, and for inspection.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import numpy as np

from twostroke.backends.page_entries import EntryPart, EntryRecords
from twostroke.errors import OutOfPages
from twostroke.models.kv_formats import KVFormat
from twostroke.models.layer_groups import PageShape
from twostroke.system.limits import available_memory

HUGE_PAGE = 2 << 20  # bytes
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux, from 5.14 on
Layout = Literal["plain", "pairs"]
LAYOUTS: tuple[Layout, ...] = ("plain", "pairs")


class PageMemory(Protocol):
    """Pages of K and V on one device. A *frame* is the place of one page."""

    # for each group, all frames as kernels see them, if they hold pages of the group: an array [depth, parts, frames,
    # Hkv, page_size, width]. In memory the frame comes first. K and V are two parts of width D, or one of records
    # (`models.kv_formats.KVFormat`); other entries are one.
    storages: Sequence[Any]
    # all frames as snapshots of states: an array [frames, page_bytes // 4] of float32; of no columns if pages are no
    # whole number of them
    state_storage: Any
    # order of a page's elements. "plain": [depth, parts, Hkv, page_size, width]. "pairs", for instructions that
    # multiply pairs: K is [depth, Hkv, D / 2, page_size, 2] (two columns of each key are adjacent), and V is [depth,
    # Hkv, page_size / 2, D, 2] (the values of two slots are adjacent). Codes are in fours in the same way, for each
    # head those of K, their scales, [page_size], those of V, and their scales. Other entries stay plain.
    layout: Layout
    page_bytes: int  # bytes of a page

    def read_pages(self, frames: Sequence[int]) -> list[memoryview]:
        """The bytes of pages. Read-only. In host memory they are views and change with it."""
        ...

    def filling(self, frame: int) -> AbstractContextManager[memoryview]:
        """Writable bytes of a page, so that a file can be read into it directly. Written when the context exits."""
        ...

    def write_page(self, frame: int, data: memoryview | bytes) -> None:
        """Replace a page with `page_bytes` bytes."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy one frame to another."""
        ...

    def read(self, group: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather n entries of a group by frame and slot: [depth, parts, n, Hkv, width], a numpy copy."""
        ...

    def read_keys(self, group: int, layer: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather the keys of the group's i-th layer: [n, Hkv, width of K], a numpy copy."""
        ...

    def write(self, group: int, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        """Scatter entries, the inverse of `read`."""
        ...


class HostMemory:
    """A `PageMemory` in zeroed virtual memory. A page takes no physical memory until it is written."""

    def __init__(
        self, num_pages: int, shape: PageShape, layout: Layout = "plain", data: np.ndarray | None = None
    ) -> None:
        """Allocate pages, or use the given bytes.

        Args:
            num_pages: number of frames.
            shape: what a page holds.
            layout: see `PageMemory`.
            data: uint8, the bytes of all pages one after another, used in place.

        Raises:
            OutOfPages: there is not enough memory.
        """
        self.layout: Layout = layout
        self.page_bytes = shape.page_bytes
        data = _zeros(num_pages, self.page_bytes) if data is None else data
        self._pages = data.reshape(num_pages, self.page_bytes)
        kinds = [(shape.of(g), shape.dtype_of(g), one.kind == "kv") for g, one in enumerate(shape.groups)]
        views = {kind: self._view(*kind[:2]) for kind in kinds}
        parts = {kind: self._parts(view, shape.stored, kind[2]) for kind, view in views.items()}
        self.storages: Sequence[Any] = [views[kind] for kind in kinds]
        self._parts_of = [parts[kind] for kind in kinds]
        # A rank without heads has pages of no bytes; no model with states is shared among ranks.
        whole = self.page_bytes > 0 and self.page_bytes % 4 == 0
        self.state_storage: Any = self._pages.view(np.float32) if whole else np.empty((num_pages, 0), np.float32)

    def _view(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """All frames as pages of this shape, [depth, parts, frames, Hkv, page_size, width]."""
        used = self._pages[:, : math.prod(shape) * dtype.itemsize].view(dtype)
        return used.reshape(len(self._pages), *shape).transpose(1, 2, 0, 3, 4, 5)

    def _parts(self, view: np.ndarray, stored: KVFormat, is_kv: bool) -> Sequence[EntryPart | EntryRecords]:
        in_pairs = is_kv and self.layout == "pairs"
        if is_kv and stored.codes:
            return [EntryRecords(view[:, 0], stored, in_pairs)]
        orders = ("columns", "slots") if in_pairs else (None, None)
        return [EntryPart(part, order) for part, order in zip(view.swapaxes(0, 1), orders, strict=False)]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self._pages.nbytes

    @property
    def address(self) -> int:
        """The address of the first page; the others follow without a gap."""
        return self._pages.ctypes.data

    def populate(self) -> bool:
        """Take physical memory for all pages now; what they hold stays. Otherwise whoever writes to a page for the
        first time waits for the system, which a decode worker's streams would notice.

        Returns whether the system has done so.
        """
        start = -(-self.address // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (self.address + self._pages.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        advise = getattr(ctypes.CDLL(None), "madvise", None)
        if advise is None or size <= 0:
            return False
        return advise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE_WRITE) == 0

    def read_pages(self, frames: Sequence[int]) -> list[memoryview]:
        return [self._pages[frame].data.toreadonly() for frame in frames]

    def filling(self, frame: int) -> AbstractContextManager[memoryview]:
        return nullcontext(self._pages[frame].data)

    def write_page(self, frame: int, data: memoryview | bytes) -> None:
        self._pages[frame] = np.frombuffer(data, np.uint8)

    def copy_page(self, source: int, target: int) -> None:
        self._pages[target] = self._pages[source]

    def read(self, group: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return np.stack([part.take(frames, slots) for part in self._parts_of[group]], 1)

    def read_keys(self, group: int, layer: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self._parts_of[group][0].keys.take(frames, slots, layer)

    def write(self, group: int, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        for part, new in zip(self._parts_of[group], np.moveaxis(entries, 1, 0), strict=True):
            part.put(frames, slots, new)


def host_kv_room() -> int:
    """`Backend.kv_room` in ordinary memory: a quarter of what is available, at most 4 GiB."""
    return min(available_memory() // 4, 4 << 30)


def _zeros(num_pages: int, page_bytes: int) -> np.ndarray:
    """Zeroed bytes. Zeros matter: a masked slot is multiplied by a weight of 0, and 0 times nan is nan."""
    size = num_pages * page_bytes
    try:
        memory = np.zeros(size + HUGE_PAGE, np.uint8)
    except (MemoryError, ValueError):
        raise OutOfPages(f"there is no memory for a pool of {num_pages:,} KV pages: give it less (kv_bytes)") from None
    # Memory is taken only when a page is touched.
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + size]
