"""Pages of KV entries, shared by reference count."""

import threading
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import torch

from twostroke.errors import OutOfPages
from twostroke.kv.geometry import Geometry

FREE = -1  # how far a page on the free list is filled
ALL = slice(None)
HUGE_PAGE = 2 << 20  # bytes


class PagePool:
    """All pages of one geometry on one device.

    Storage is [layers, 2, pages, Hkv, page_size, D]: within a layer a page of one head is contiguous, and pages
    handed out one after another lie side by side. A backend may want what is there `in_pairs`, as instructions that
    multiply pairs take them: two columns of a key, [D / 2, page_size, 2], and the values of two slots,
    [page_size / 2, D, 2]. On a CPU it is reserved as zeroed virtual memory, which costs nothing until a page is
    written, so a large pool is free.

    Attributes:
        reclaim: called with a number of pages when the free list runs short; may release some (prefix eviction).
    """

    def __init__(
        self,
        geometry: Geometry,
        num_pages: int,
        page_size: int = 16,
        device: torch.device | str = "cpu",
        in_pairs: bool = False,
    ) -> None:
        self.geometry, self.num_pages, self.page_size = geometry, num_pages, page_size
        # A page of all layers lies in one place: memory is touched page by page, and a page moves in one piece.
        shape = (num_pages, geometry.num_layers, 2, geometry.num_kv_heads, page_size, geometry.head_dim)
        pages = _zeros(shape, getattr(torch, geometry.kv_dtype), torch.device(device))
        self.storage = pages.permute(1, 2, 0, 3, 4, 5)  # as kernels see it: [layers, 2, pages, Hkv, page_size, D]
        keys, values = self.storage.unbind(1)
        self._sides = _Side(keys, "columns" if in_pairs else None), _Side(values, "slots" if in_pairs else None)
        self.entry_bytes = geometry.entry_bytes
        self.reclaim: Callable[[int], None] | None = None
        self._refs = np.zeros(num_pages, np.int64)
        self._filled = np.full(num_pages, FREE, np.int64)  # slots of each page that some value has claimed
        self._free = list(range(num_pages - 1, -1, -1))
        # Values are released by whichever thread drops them, garbage collection included: hence reentrant.
        self._lock = threading.RLock()

    @property
    def page_bytes(self) -> int:
        return self.entry_bytes * self.page_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. Raises OutOfPages, having taken none."""
        if not count:
            return []
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        with self._lock:
            if count > len(self._free):
                raise OutOfPages(
                    f"{count} more KV pages are needed and {len(self._free)} of {self.num_pages} are free: drop "
                    f"values that are no longer used, or give the pool more memory (kv_bytes)"
                )
            pages = [self._free.pop() for _ in range(count)]
            self._refs[pages] = 1
            self._filled[pages] = 0
            return pages

    def retain(self, pages: np.ndarray) -> None:
        """One more reference for every occurrence of a page."""
        with self._lock:
            np.add.at(self._refs, pages, 1)

    def release(self, pages: np.ndarray) -> None:
        """One reference less for every occurrence; a page without any is free."""
        with self._lock:
            np.subtract.at(self._refs, pages, 1)
            # The garbage collector may drop another value right here and free some of these pages: not twice.
            freed = np.unique(pages[(self._refs[pages] == 0) & (self._filled[pages] != FREE)])
            self._filled[freed] = FREE
            self._free.extend(freed[::-1].tolist())

    def references(self, page: int) -> int:
        return int(self._refs[page])

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

    def copy_slots(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy slots [start, stop) of one page to the same slots of a fresh one, in every layer."""
        slots = np.arange(start, stop)
        self.write(np.full_like(slots, target), slots, self.read(np.full_like(slots, source), slots))
        self._filled[target] = stop

    def read(self, pages: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Gather entries: [layers, 2, n, Hkv, D], a copy."""
        return torch.stack([side.take(pages, slots) for side in self._sides], 1)

    def read_keys(self, layer: int, pages: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Gather one layer's keys: [n, Hkv, D], a copy."""
        return self._sides[0].take(pages, slots, layer)

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: torch.Tensor) -> None:
        """Scatter entries, the inverse of `read`."""
        for side, new in zip(self._sides, entries.to(self.storage).unbind(1), strict=True):
            side.put(pages, slots, new)


class _Side:
    """K or V of all pages, by page and slot: [layers, n, Hkv, D], however a page is laid out."""

    def __init__(self, storage: torch.Tensor, pairs: Literal["columns", "slots"] | None) -> None:
        """`storage`: [layers, pages, Hkv, page_size, D], where a page may hold pairs of columns or of slots instead."""
        self.pairs = pairs
        size, dim = storage.shape[3:]
        if pairs == "columns":
            self.view = storage.view(*storage.shape[:3], dim // 2, size, 2).permute(0, 1, 4, 2, 3, 5)
        elif pairs == "slots":
            self.view = storage.view(*storage.shape[:3], size // 2, dim, 2).permute(0, 1, 3, 5, 2, 4)
        else:
            self.view = storage.transpose(2, 3)

    def take(self, pages: np.ndarray, slots: np.ndarray, layers: slice | int = ALL) -> torch.Tensor:
        """A copy; of one layer [n, Hkv, D]."""
        taken = self.view[(layers, *self._places(pages, slots))]
        return taken.flatten(-2) if self.pairs == "columns" else taken

    def put(self, pages: np.ndarray, slots: np.ndarray, entries: torch.Tensor) -> None:
        places = (ALL, *self._places(pages, slots))
        self.view[places] = entries.unflatten(-1, (-1, 2)) if self.pairs == "columns" else entries

    def _places(self, pages: np.ndarray, slots: np.ndarray) -> list[torch.Tensor]:
        axes = [pages, slots // 2, slots % 2] if self.pairs == "slots" else [pages, slots]
        return [torch.from_numpy(axis.astype(np.int64)) for axis in axes]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed storage. Zeros matter: a masked slot still meets a weight of 0, and 0 times a stray nan is nan."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        memory = np.zeros(size + HUGE_PAGE, np.uint8)
    except (MemoryError, ValueError):
        raise OutOfPages(f"there is no memory for a pool of {shape[0]:,} KV pages: give it less (kv_bytes)") from None
    # numpy asks the operating system for zero pages, which take memory only when touched; torch would write them.
    start = -memory.ctypes.data % HUGE_PAGE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def check_counts(pool: PagePool, holders: Iterable[np.ndarray]) -> None:
    """Raise AssertionError unless the pool's reference counts are exactly those of `holders`' pages (for tests)."""
    expected = np.zeros(pool.num_pages, np.int64)
    for pages in holders:
        np.add.at(expected, pages, 1)
    held = np.array([pool.references(page) for page in range(pool.num_pages)])
    assert (held == expected).all(), f"pages {np.flatnonzero(held != expected).tolist()} are miscounted"
    assert pool.num_used == np.count_nonzero(expected)
