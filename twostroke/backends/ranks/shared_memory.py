"""Memory that the processes of one host share."""

import mmap
import os

import numpy as np

from twostroke.system.anonymous_file import anonymous_file
from twostroke.system.process_exit import free_with


class SharedMemory:
    """Zeroed bytes that every process sees which has the file descriptor. Untouched pages take no memory."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Make a segment, or map that of a file descriptor, which then belongs to it. Raises OSError, OverflowError."""
        # the file, which has no name; it ends with the last process that has it
        self.fd = anonymous_file("twostroke") if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        free_with(self, os.close, self.fd)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # has an effect where the system allows it for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.data = np.frombuffer(self._map, np.uint8)  # [size] uint8
