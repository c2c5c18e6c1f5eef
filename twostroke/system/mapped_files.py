"""Memory-mapped files, and rows of files that are read one by one instead."""

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.system.process_exit import free_with

AROUND = 64 << 10  # bytes that Linux maps around one that is read (fault_around_bytes), and a multiple of a page


class MappedFile(mmap.mmap):
    """A whole file, mapped for reading. Raises OSError, or ValueError if it is empty."""

    path: Path
    fd: int

    def __new__(cls, path: Path) -> Self:
        fd = os.open(path, os.O_RDONLY)
        try:
            self = super().__new__(cls, fd, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(fd)
            raise
        self.path, self.fd = path, fd
        free_with(self, os.close, fd)
        return self


def locate_in_file(data: np.ndarray) -> tuple[MappedFile, int] | None:
    """(the mapped file that an array is a view of, byte offset); None if it is not a view of one."""
    owner = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not (isinstance(owner, memoryview) and isinstance(owner.obj, MappedFile)):
        return None
    return owner.obj, data.ctypes.data - np.frombuffer(owner.obj, np.uint8).ctypes.data


def drop_resident(data: np.ndarray) -> None:
    """Frees the resident pages of bytes in a mapped file; a later access reads the file again."""
    if (found := locate_in_file(data)) is not None:
        file, offset = found
        start = offset // AROUND * AROUND
        stop = min(-(-(offset + data.nbytes) // AROUND) * AROUND, len(file))
        file.madvise(mmap.MADV_DONTNEED, start, stop - start)


class FileRows:
    """Rows of a mapped matrix of bytes, read from the file on demand, so they take no memory of this process.

    The system is advised to keep them in its page cache. The mapping itself is no longer needed.
    """

    def __init__(self, file: MappedFile, offset: int, data: np.ndarray, source: str) -> None:
        self.offset, self.row_bytes, self.source = offset, data.shape[1], source
        self.fd = os.dup(file.fd)
        free_with(self, os.close, self.fd)
        self.opened = self._version()
        with suppress(OSError):  # not every file system supports hints
            if hasattr(os, "posix_fadvise"):  # Linux
                os.posix_fadvise(self.fd, offset, data.nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, rows: Sequence[int]) -> bytes:
        """[len(rows), row_bytes]. Raises CheckpointError if the file was changed or cannot be read."""
        first, size = self.offset, self.row_bytes
        try:
            found = b"".join([os.pread(self.fd, size, first + row * size) for row in rows])
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(
                f"{self.source}: the file cannot be read any more ({reason}): check its disk"
            ) from error
        if self._version() != self.opened or len(found) != len(rows) * size:
            raise CheckpointError(f"{self.source}: the file was changed while the model was in use: open it again")
        return found

    def _version(self) -> tuple[int, int]:
        state = os.fstat(self.fd)
        return state.st_size, state.st_mtime_ns


def row_reader(data: np.ndarray, source: str) -> Callable[[Sequence[int]], bytes]:
    """A function that reads rows of a matrix of bytes by index; see FileRows for a mapped file."""
    if (found := locate_in_file(data)) is None:
        return lambda rows: data[rows].tobytes()
    drop_resident(data)
    return FileRows(*found, data, source).read
