"""Equal slots of memory that goes back to the system as soon as a slot is given back.

The C library keeps freed blocks of some hundred KB in its heap, where they fragment. So slots lie in mapped chunks.
Each slot begins on a page of the system's memory, and a slot that is given back loses its physical memory at once.
"""

import mmap

import numpy as np

CHUNK = 64 << 20  # bytes, about


class SlabAllocator:
    """Slots of `size` bytes. Taking one may raise MemoryError; giving one back never waits, so finalizers may do it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._per_chunk = max(1, CHUNK // self._stride)
        self._chunks: list[mmap.mmap] = []
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        """Number of slots taken and not given back."""
        return len(self._chunks) * self._per_chunk - len(self._free)

    def allocate(self) -> int:
        """An unused slot, with any contents. Its caller guards against other threads that take one."""
        while True:
            try:
                return self._free.pop()
            except IndexError:
                self._grow()

    def _grow(self) -> None:
        try:
            chunk = mmap.mmap(-1, self._per_chunk * self._stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            raise MemoryError(f"no memory for {self._per_chunk * self._stride:,} bytes") from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take memory for slots that nobody uses
            chunk.madvise(mmap.MADV_NOHUGEPAGE)
        first = len(self._chunks) * self._per_chunk
        self._chunks.append(chunk)
        self._free.extend(range(first + self._per_chunk - 1, first - 1, -1))

    def free(self, slot: int) -> None:
        chunk, index = divmod(slot, self._per_chunk)
        self._chunks[chunk].madvise(mmap.MADV_DONTNEED, index * self._stride, self._stride)
        self._free.append(slot)  # atomic

    def view(self, slot: int) -> np.ndarray:
        """The bytes of a slot, [size] uint8, writable. Not valid after the slot was given back."""
        chunk, index = divmod(slot, self._per_chunk)
        return np.frombuffer(self._chunks[chunk], np.uint8, self.size, index * self._stride)
