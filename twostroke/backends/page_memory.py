"""The memory of a pool's pages: the interface, and its implementation in host memory.

A page holds K and V of `page_size` entries in the layers of one group (`models.layer_groups`), in one piece of
`page_bytes` bytes, as many for every group. It moves as these bytes: to another page, to a file, to another memory of
the same layout. Single entries are read and written only if a page is used in part, and for inspection.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import numpy as np

from twostroke.errors import OutOfPages
from twostroke.models.layer_groups import PageShape
from twostroke.system.memory import available_memory

ALL = slice(None)
HUGE_PAGE = 2 << 20  # bytes
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux, from 5.14 on
Layout = Literal["plain", "pairs"]
LAYOUTS: tuple[Layout, ...] = ("plain", "pairs")


class PageMemory(Protocol):
    """Pages of K and V on one device. A *frame* is the place of one page.

    Attributes:
        storages: for each group, all frames as kernels see them, if they hold pages of the group: an array
            [depth, parts, frames, Hkv, page_size, width]. In memory the frame comes first. K and V are two parts, other
            entries one. `width` is D, or bytes of codes and their scale (`models.kv_formats`).
        state_storage: all frames as snapshots of states: an array [frames, page_bytes // 4] of float32; of no columns
            if pages are no whole number of them.
        layout: order of a page's elements. "plain": [depth, 2, Hkv, page_size, width]. "pairs", for instructions that
            multiply pairs: K is [depth, Hkv, D / 2, page_size, 2] (two columns of each key are adjacent), and V is
            [depth, Hkv, page_size / 2, D, 2] (the values of two slots are adjacent). Codes are in fours in the same
            way, and each head is followed by its scales, [page_size]; other entries stay plain.
        page_bytes: bytes of a page.
    """

    storages: Sequence[Any]
    state_storage: Any
    layout: Layout
    page_bytes: int

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
        """Gather the keys of the group's i-th layer: [n, Hkv, width], a numpy copy."""
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
        kinds = [(shape.of(g), shape.dtype_of(g)) for g in range(len(shape.groups))]
        views = {kind: self._view(*kind) for kind in kinds}
        sides = {kind: self._sides(view, shape.stored.scale_bytes) for kind, view in views.items()}
        self.storages: Sequence[Any] = [views[kind] for kind in kinds]
        self._sides_of = [sides[kind] for kind in kinds]
        # A rank without heads has pages of no bytes; no model with states is shared among ranks.
        whole = self.page_bytes > 0 and self.page_bytes % 4 == 0
        self.state_storage: Any = self._pages.view(np.float32) if whole else np.empty((num_pages, 0), np.float32)

    def _view(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """All frames as pages of this shape, [depth, parts, frames, Hkv, page_size, width]."""
        used = self._pages[:, : math.prod(shape) * dtype.itemsize].view(dtype)
        return used.reshape(len(self._pages), *shape).transpose(1, 2, 0, 3, 4, 5)

    def _sides(self, view: np.ndarray, scale_bytes: int) -> list[_EntryPart]:
        orders = ("columns", "slots") if self.layout == "pairs" and view.shape[1] == 2 else (None, None)
        return [_EntryPart(view[:, part], orders[part], scale_bytes) for part in range(view.shape[1])]

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
        return np.stack([side.take(frames, slots) for side in self._sides_of[group]], 1)

    def read_keys(self, group: int, layer: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self._sides_of[group][0].take(frames, slots, layer)

    def write(self, group: int, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        for side, new in zip(self._sides_of[group], np.moveaxis(entries, 1, 0), strict=True):
            side.put(frames, slots, new)


class _EntryPart:
    """K, V or other entries of all pages, by frame and slot: [layers, n, Hkv, width], for any layout of pages."""

    def __init__(self, storage: np.ndarray, pairs: Literal["columns", "slots"] | None, scale_bytes: int) -> None:
        """`storage`: [layers, frames, Hkv, page_size, width]; in pairs, or in fours of codes."""
        self.pairs, self.dtype, self.scales = pairs, storage.dtype, None
        bits = storage.view(f"u{storage.itemsize}")  # numpy copies unknown dtypes (bfloat16) one element at a time
        layers, frames, heads, size, dim = storage.shape
        self.together = 4 if scale_bytes else 2
        if pairs is not None and scale_bytes:  # behind a head's codes
            dim -= scale_bytes
            flat = bits.reshape(layers, frames, heads, -1)
            bits = flat[..., : size * dim]
            self.scales = flat[..., size * dim :].reshape(layers, frames, heads, size, scale_bytes).swapaxes(2, 3)
        n = self.together
        if pairs == "columns":
            self.view = bits.reshape(layers, frames, heads, dim // n, size, n).transpose(0, 1, 4, 2, 3, 5)
        elif pairs == "slots":
            self.view = bits.reshape(layers, frames, heads, size // n, dim, n).transpose(0, 1, 3, 5, 2, 4)
        else:
            self.view = bits.swapaxes(2, 3)

    def take(self, frames: np.ndarray, slots: np.ndarray, layers: slice | int = ALL) -> np.ndarray:
        """A copy, [layers, n, Hkv, width]; for one layer [n, Hkv, width]."""
        taken = self.view[(layers, *self._places(frames, slots))]
        if self.pairs == "columns":
            taken = taken.reshape(*taken.shape[:-2], self.together * taken.shape[-2])
        if self.scales is not None:
            taken = np.concatenate([taken, self.scales[layers, frames, slots]], -1)
        return np.ascontiguousarray(taken).view(self.dtype)

    def put(self, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        bits = np.ascontiguousarray(entries, self.dtype).view(self.view.dtype)
        if self.scales is not None:
            bits, self.scales[:, frames, slots] = np.split(bits, [bits.shape[-1] - self.scales.shape[-1]], -1)
        if self.pairs == "columns":
            bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // self.together, self.together)
        self.view[(ALL, *self._places(frames, slots))] = bits

    def _places(self, frames: np.ndarray, slots: np.ndarray) -> list[np.ndarray]:
        n = self.together
        return [frames, slots // n, slots % n] if self.pairs == "slots" else [frames, slots]


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
