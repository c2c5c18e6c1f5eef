"""One page in one file: a block that says what it is, and the entries.

    block    header and tokens, zeros, seal (the last 32 bytes); a multiple of 4,096 bytes
    payload  the page, as it lies in the pool, or compressed

The seal covers all of it. A file is written under another name, and gets its own when it is whole.
"""

import errno
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from twostroke.kv.tiers.names import PageName
from twostroke.kv.tiers.page_format import HEADER_BYTES, SEAL_BYTES, PageFormat, PageHeader, read_header, seal

BLOCK = 4096
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # neither links nor pipes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def block_bytes(header_bytes: int) -> int:
    """Size of the block for a header and tokens of `header_bytes`."""
    return -(-(header_bytes + SEAL_BYTES) // BLOCK) * BLOCK


def block(page_format: PageFormat, name: PageName, payload: memoryview) -> bytes:
    head = _head(page_format, name, len(payload))
    return head + page_format.seal(head, payload)


def reserve(path: str, size: int) -> tuple[int, int]:
    """A new file whose space is taken: (descriptor, bytes that it takes). Raises OSError, and leaves no file then."""
    file = os.open(path, _NEW, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        return file, disk_bytes(os.fstat(file))
    except BaseException:
        os.close(file)
        os.unlink(path)
        raise


def fill(file: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts to the start of a file. Raises OSError."""
    views, at = [memoryview(part) for part in parts], 0
    while views:
        done = os.pwritev(file, views, at)
        at += done
        _pass(views, done)


def disk_bytes(status: os.stat_result) -> int:
    """Bytes that a file or a directory takes on the disk, as `du` counts them."""
    return status.st_blocks * 512


def read_page(path: str, page_format: PageFormat, name: PageName, into: memoryview) -> bool:
    """Read a file, and say whether it is this page. `into` may hold anything if it is not. Raises OSError."""
    own = bytearray(block_bytes(HEADER_BYTES + len(name.tokens)))
    try:
        with opened(path) as file:
            status = os.fstat(file)
            payload = page_format.room(status.st_size - len(own), into)
            if not stat.S_ISREG(status.st_mode) or payload is None:
                return False
            if not _whole(file, [memoryview(own), payload]):
                return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link in its place
            return False
        raise
    return bytes(own) == block(page_format, name, payload) and page_format.unpack(payload, into)


@dataclass(frozen=True)
class StoredPage:
    """A file that holds what its own block says: whose page it is."""

    namespace: bytes
    name: PageName


def verify_file(file: int, user_key: bytes) -> StoredPage | None:
    """What an open file holds, without knowing it before; None: it is damaged, or sealed by another key.

    Raises OSError.
    """
    header = _header(file)
    if header is None:
        return None
    start = block_bytes(HEADER_BYTES + header.tokens_bytes)
    view = memoryview(bytearray(start + header.payload_bytes))
    if not _whole(file, [view]):
        return None
    head, sealed, payload = view[: start - SEAL_BYTES], view[start - SEAL_BYTES : start], view[start:]
    if seal(head, payload, user_key) != bytes(sealed):
        return None
    return StoredPage(header.namespace, header.name(view))


def peek(path: str) -> StoredPage | None:
    """What a file says that it holds; its entries are not read. None: it says nothing, or has another size.

    Raises OSError.
    """
    file = os.open(path, _READ)
    try:
        header = _header(file)
        if header is None:
            return None
        return StoredPage(header.namespace, header.name(os.pread(file, HEADER_BYTES + header.tokens_bytes, 0)))
    finally:
        os.close(file)


def _header(file: int) -> PageHeader | None:
    """The header of an open file; None: there is none, or the file has another size than it says. Raises OSError."""
    header = read_header(os.pread(file, HEADER_BYTES, 0))
    if header is None:
        return None
    size = block_bytes(HEADER_BYTES + header.tokens_bytes) + header.payload_bytes
    return header if os.fstat(file).st_size == size else None


@contextmanager
def opened(path: str) -> Generator[int]:
    """An open file; the system begins to read all of it. Raises OSError."""
    file = os.open(path, _READ)
    try:
        with suppress(OSError):  # it may be no file; then reading says so
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        yield file
    finally:
        os.close(file)


def _head(page_format: PageFormat, name: PageName, size: int) -> bytes:
    """The block without its seal."""
    header = page_format.header(name, size)
    return header.ljust(block_bytes(len(header)) - SEAL_BYTES, b"\0")


def _whole(file: int, views: list[memoryview]) -> bool:
    """Fill the views from the start of a file. Returns False if it is too short."""
    at = 0
    while views:
        done = os.preadv(file, views, at)
        if not done:
            return False
        at += done
        _pass(views, done)
    return True


def _pass(views: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes, which were read or written."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if views:
        views[0] = views[0][count:]
