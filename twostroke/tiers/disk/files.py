"""One page in one file: a block that says what it is, and the entries.

    block    header and tokens, zeros, seal (the last 32 bytes); a multiple of 4,096 bytes
    payload  page_bytes, as they lie in the pool

The seal covers all of it. A file is written under another name, and gets its own when it is whole.
"""

import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from twostroke.tiers.form import HEADER_BYTES, SEAL_BYTES, Form, read_header, seal
from twostroke.tiers.names import PageName

BLOCK = 4096
AHEAD_BYTES = 16 << 20  # the system is told to read this far ahead
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # neither links nor pipes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def block_bytes(header_bytes: int) -> int:
    """Size of the block for a header and tokens of `header_bytes`."""
    return -(-(header_bytes + SEAL_BYTES) // BLOCK) * BLOCK


def file_bytes(form: Form, name: PageName) -> int:
    return block_bytes(HEADER_BYTES + len(name.tokens)) + form.namespace.page_bytes


def block(form: Form, name: PageName, payload: memoryview) -> bytes:
    head = _head(form, name)
    return head + form.seal(head, payload)


def reserve(path: str, size: int) -> tuple[int, int]:
    """A new file whose space is taken: (descriptor, bytes that it takes). Raises OSError, and leaves no file then."""
    file = os.open(path, _NEW, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        return file, taken(os.fstat(file))
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
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views:
            views[0] = views[0][done:]


def taken(status: os.stat_result) -> int:
    """Bytes that a file or a directory takes on the disk, as `du` counts them."""
    return status.st_blocks * 512


def read(file: int, form: Form, name: PageName, into: memoryview) -> bytes | None:
    """Read an open file. Returns its block, or None if it is no page of this size. Raises OSError."""
    own = bytearray(file_bytes(form, name) - len(into))
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size != len(own) + len(into):
        return None
    return bytes(own) if _whole(file, [memoryview(own), into]) else None


def right(own: bytes | None, form: Form, name: PageName, payload: memoryview) -> bool:
    """Whether a file with this block and these entries is this page."""
    head = _head(form, name)
    return own == head + form.seal(head, payload)


@dataclass(frozen=True)
class Found:
    """A file that holds what its own block says: whose page it is."""

    namespace: bytes
    name: PageName


def check(file: int, user_key: bytes) -> Found | None:
    """What an open file holds, without knowing it before; None: it is damaged, or sealed by another key.

    Raises OSError.
    """
    header = read_header(os.pread(file, HEADER_BYTES, 0))
    if header is None:
        return None
    start = block_bytes(HEADER_BYTES + header.tokens_bytes)
    size = start + header.page_bytes
    if os.fstat(file).st_size != size:
        return None
    view = memoryview(bytearray(size))
    if not _whole(file, [view]):
        return None
    head, sealed, payload = view[: start - SEAL_BYTES], view[start - SEAL_BYTES : start], view[start:]
    if seal(head, payload, user_key) != bytes(sealed):
        return None
    return Found(header.namespace, header.name(view))


def open_ahead(paths: Sequence[str], size: int) -> Iterator[int | OSError]:
    """The files of pages of `size` bytes, in order, or why one cannot be opened.

    Some are opened ahead, so that the disk is never idle. Each is closed when the next is asked for.
    """
    most = max(1, AHEAD_BYTES // size)
    opened: deque[int | OSError] = deque()
    try:
        for i in range(len(paths)):
            while len(opened) < most and i + len(opened) < len(paths):
                opened.append(_open(paths[i + len(opened)]))
            yield opened[0]
            _close(opened.popleft())
    finally:
        for file in opened:
            _close(file)


def _open(path: str) -> int | OSError:
    try:
        file = os.open(path, _READ)
    except OSError as error:
        return error
    with suppress(OSError):  # it may be no file; then reading says so
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
    return file


def _close(file: int | OSError) -> None:
    if isinstance(file, int):
        os.close(file)


def _head(form: Form, name: PageName) -> bytes:
    """The block without its seal."""
    header = form.header(name)
    return header.ljust(block_bytes(len(header)) - SEAL_BYTES, b"\0")


def _whole(file: int, views: list[memoryview]) -> bool:
    """Fill the views from the start of a file. Returns False if it is too short."""
    at = 0
    while views:
        done = os.preadv(file, views, at)
        if not done:
            return False
        at += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views:
            views[0] = views[0][done:]
    return True
