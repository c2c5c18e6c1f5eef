"""Which memory is there."""

import ctypes
import mmap

import numpy as np


def resident(data: np.ndarray) -> int:
    """Bytes of `data` in physical memory, by whole pages of the system; `data` begins with one.

    The memory of a process says less: it also grows and shrinks by what others do with the C library's heap, which
    keeps freed blocks.
    """
    pages = (ctypes.c_ubyte * -(-data.nbytes // mmap.PAGESIZE))()
    library = ctypes.CDLL(None, use_errno=True)
    if library.mincore(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
