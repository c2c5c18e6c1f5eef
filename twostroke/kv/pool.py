"""Pages of KV entries, shared by reference count."""

import threading
from collections.abc import Callable, Iterable

import numpy as np
import torch

from twostroke.errors import OutOfPages
from twostroke.kv.geometry import Geometry

FREE = -1  # how far a page on the free list is filled


class PagePool:
    """All pages of one geometry on one device.

    Storage is [layers, 2, pages, Hkv, page_size, D]: within a layer a page of one head is contiguous, and pages
    handed out one after another lie side by side; a backend may want a page's keys as [D, page_size] there. On a CPU
    it is reserved as zeroed virtual memory, which costs nothing until a page is written, so a large pool is free.

    Attributes:
        reclaim: called with a number of pages when the free list runs short; may release some (prefix eviction).
    """

    def __init__(
        self,
        geometry: Geometry,
        num_pages: int,
        page_size: int = 16,
        device: torch.device | str = "cpu",
        transposed_keys: bool = False,
    ) -> None:
        self.geometry, self.num_pages, self.page_size = geometry, num_pages, page_size
        # A page of all layers lies in one place: memory is touched page by page, and a page moves in one piece.
        shape = (num_pages, geometry.num_layers, 2, geometry.num_kv_heads, page_size, geometry.head_dim)
        pages = _zeros(shape, getattr(torch, geometry.kv_dtype), torch.device(device))
        self.storage = pages.permute(1, 2, 0, 3, 4, 5)  # as kernels see it: [layers, 2, pages, Hkv, page_size, D]
        keys, values = self.storage.unbind(1)
        if transposed_keys:
            keys = keys.view(*keys.shape[:3], geometry.head_dim, page_size).transpose(-1, -2)
        self._sides = keys, values  # views of [layers, pages, Hkv, page_size, D]
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
        for side in self._sides:
            side[:, target, :, start:stop] = side[:, source, :, start:stop]
        self._filled[target] = stop

    def read(self, pages: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Gather entries: [layers, 2, n, Hkv, D], a copy."""
        index = torch.from_numpy(pages.astype(np.int64)), torch.from_numpy(slots.astype(np.int64))
        return torch.stack([side.transpose(2, 3)[:, index[0], index[1]] for side in self._sides], 1)

    def read_keys(self, layer: int, pages: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Gather one layer's keys: [n, Hkv, D], a copy."""
        index = torch.from_numpy(pages.astype(np.int64)), torch.from_numpy(slots.astype(np.int64))
        return self._sides[0][layer].transpose(1, 2)[index]

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: torch.Tensor) -> None:
        """Scatter entries, the inverse of `read`."""
        index = torch.from_numpy(pages.astype(np.int64)), torch.from_numpy(slots.astype(np.int64))
        for side, new in zip(self._sides, entries.to(self.storage).unbind(1), strict=True):
            side.transpose(2, 3)[:, index[0], index[1]] = new


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed storage. Zeros matter: a masked slot still meets a weight of 0, and 0 times a stray nan is nan."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = np.zeros(int(np.prod(shape, dtype=object)) * dtype.itemsize, np.uint8)
    except (MemoryError, ValueError):
        raise OutOfPages(f"there is no memory for a pool of {shape[0]:,} KV pages: give it less (kv_bytes)") from None
    # numpy asks the operating system for zero pages, which take memory only when touched; torch would write them.
    return torch.from_numpy(memory).view(dtype).view(shape)


def check_counts(pool: PagePool, holders: Iterable[np.ndarray]) -> None:
    """Raise AssertionError unless the pool's reference counts are exactly those of `holders`' pages (for tests)."""
    expected = np.zeros(pool.num_pages, np.int64)
    for pages in holders:
        np.add.at(expected, pages, 1)
    held = np.array([pool.references(page) for page in range(pool.num_pages)])
    assert (held == expected).all(), f"pages {np.flatnonzero(held != expected).tolist()} are miscounted"
    assert pool.num_used == np.count_nonzero(expected)
