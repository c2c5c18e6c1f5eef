"""Where the numbers of KV pages lie: what a backend makes, and a pool hands out page by page."""

from typing import Any, Literal, Protocol

import numpy as np

from twostroke.errors import OutOfPages

ALL = slice(None)
HUGE_PAGE = 2 << 20  # bytes


class Memory(Protocol):
    """Pages in a backend's memory.

    Attributes:
        storage: [layers, 2, pages, Hkv, page_size, D], as kernels see it; numpy's, or a tensor on a device.
    """

    storage: Any

    def read(self, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather entries: [layers, 2, n, Hkv, D], a copy."""
        ...

    def read_keys(self, layer: int, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Gather one layer's keys: [n, Hkv, D], a copy."""
        ...

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        """Scatter entries, the inverse of `read`."""
        ...


class HostMemory:
    """Pages in zeroed virtual memory, which costs nothing until a page is written: so a large pool is free.

    A backend may want what is there `in_pairs`, as instructions that multiply pairs take them: two columns of a key,
    [D / 2, page_size, 2], and the values of two slots, [page_size / 2, D, 2].

    Attributes:
        storage: [layers, 2, pages, Hkv, page_size, D].
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, in_pairs: bool) -> None:
        """`shape`: [pages, layers, 2, Hkv, page_size, D]. Raises OutOfPages without room for it."""
        self.storage = _zeros(shape, dtype).transpose(1, 2, 0, 3, 4, 5)
        keys, values = self.storage[:, 0], self.storage[:, 1]
        self._sides = _Side(keys, "columns" if in_pairs else None), _Side(values, "slots" if in_pairs else None)

    def read(self, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return np.stack([side.take(pages, slots) for side in self._sides], 1)

    def read_keys(self, layer: int, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self._sides[0].take(pages, slots, layer)

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        for side, new in zip(self._sides, np.moveaxis(entries, 1, 0), strict=True):
            side.put(pages, slots, new)


class _Side:
    """K or V of all pages, by page and slot: [layers, n, Hkv, D], however a page is laid out."""

    def __init__(self, storage: np.ndarray, pairs: Literal["columns", "slots"] | None) -> None:
        """`storage`: [layers, pages, Hkv, page_size, D], where a page may hold pairs of columns or of slots instead."""
        self.pairs, self.dtype = pairs, storage.dtype
        bits = storage.view(f"u{storage.itemsize}")  # numpy moves numbers that it does not know one by one
        layers, pages, heads, size, dim = storage.shape
        if pairs == "columns":
            self.view = bits.reshape(layers, pages, heads, dim // 2, size, 2).transpose(0, 1, 4, 2, 3, 5)
        elif pairs == "slots":
            self.view = bits.reshape(layers, pages, heads, size // 2, dim, 2).transpose(0, 1, 3, 5, 2, 4)
        else:
            self.view = bits.swapaxes(2, 3)

    def take(self, pages: np.ndarray, slots: np.ndarray, layers: slice | int = ALL) -> np.ndarray:
        """A copy; of one layer [n, Hkv, D]."""
        taken = self.view[(layers, *self._places(pages, slots))]
        if self.pairs == "columns":
            taken = taken.reshape(*taken.shape[:-2], -1)
        return np.ascontiguousarray(taken).view(self.dtype)

    def put(self, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        bits = np.ascontiguousarray(entries, self.dtype).view(self.view.dtype)
        if self.pairs == "columns":
            bits = bits.reshape(*bits.shape[:-1], -1, 2)
        self.view[(ALL, *self._places(pages, slots))] = bits

    def _places(self, pages: np.ndarray, slots: np.ndarray) -> list[np.ndarray]:
        return [pages, slots // 2, slots % 2] if self.pairs == "slots" else [pages, slots]


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeroed storage. Zeros matter: a masked slot still meets a weight of 0, and 0 times a stray nan is nan."""
    try:
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        memory = np.zeros(size + HUGE_PAGE, np.uint8)
    except (MemoryError, ValueError):
        raise OutOfPages(f"there is no memory for a pool of {shape[0]:,} KV pages: give it less (kv_bytes)") from None
    # These are the operating system's zero pages, which take memory only when touched.
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + size].view(dtype).reshape(shape)
