"""Reused memory for large, short-lived arrays. Fresh memory is slow, as the system clears it page by page."""

import ctypes
import math
import mmap
import weakref

import numpy as np

HUGE_PAGE = 2 << 20  # bytes
MAX_KEPT_BYTES = 64 << 20
NONE = memoryview(bytearray())


class ScratchMemory:
    """Float32 arrays whose memory is reused once no reference to them or a view of them is left. One block is kept."""

    def __init__(self) -> None:
        self.free: list[memoryview] = []

    def array(self, *shape: int) -> np.ndarray:
        """An uninitialized array, in huge pages if large. It is the base of its views, as if it owned its memory."""
        size = 4 * math.prod(shape)
        try:
            memory = self.free.pop()  # atomic: two threads may call this
        except IndexError:
            memory = NONE
        if len(memory) < size:
            memory = _mapped(size)
        lease = (ctypes.c_char * size).from_buffer(memory)
        weakref.finalize(lease, self._give_back, memory)
        return np.ndarray(shape, np.float32, memoryview(lease).cast("B"))

    def _give_back(self, memory: memoryview) -> None:
        if len(memory) <= MAX_KEPT_BYTES:
            self.free = [memory]


def _mapped(size: int) -> memoryview:
    try:
        whole = mmap.mmap(-1, size + HUGE_PAGE)  # untouched pages take addresses but no memory
    except OSError:
        raise MemoryError(f"no memory for {size:,} bytes") from None
    start = -address(np.frombuffer(whole, np.uint8)) % HUGE_PAGE
    if size >= HUGE_PAGE:
        whole.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(whole)[start : start + size]


def address(array: np.ndarray) -> int:
    """The array's address, in half the time of `ctypes.data`."""
    return array.__array_interface__["data"][0]
