"""A value as a stream of bytes: a header, the pages as they are in memory, the tail, and a seal.

    magic            16 bytes
    header           a section of JSON (`header`)
    pages            for each: its bytes, and their sha256. Slots outside the value are zeros
    tail             a section: logits, float32, or nothing
    seal             a section: blake2b of all checksums before it under this user's key (`system.key`), or nothing

A *section* is its length (uint64, little endian), its bytes, and their sha256. If the file has the pool's layout, pages
are written from the pool's memory and read into it directly, without a copy.

A stream is not trusted. All fields and sizes are checked before the pool is touched, and a later error gives the pages
back. Only a valid seal proves the provenance of the entries. Without it they are canonical for no model, and the
logits are dropped: the next stroke computes them again.
"""

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from twostroke.backends.lazy_logits import StoredLogits
from twostroke.errors import CorruptFile, KVError
from twostroke.kv import spans
from twostroke.kv import stream_header as headers
from twostroke.kv.entries import EntryTable
from twostroke.kv.header_fields import InvalidHeader
from twostroke.kv.page_contents import in_layout, masked_page, reading, require_page_size
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.kv.stream_header import StreamHeader
from twostroke.system.atomic_files import atomic_replace, check_file_name
from twostroke.system.user_key import user_key, user_keys

log = logging.getLogger(__name__)
MAGIC = b"twostroke-kv-4\n\0"
OLD_MAGICS = (b"twostroke-kv-1\n\0", b"twostroke-kv-2\n\0", b"twostroke-kv-3\n\0")
DIGEST_BYTES = 32
MAX_HEADER = 256 << 20  # some million entries; a larger one is damaged
MAX_SEAL = 1024


class StreamReader:
    """An untrusted file, read from front to back."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        # path: for messages; remaining: number of bytes left
        self._file, self.path, self.remaining = file, path, size

    def fill(self, view: memoryview) -> None:
        """Read bytes until the view is full. Raises CorruptFile if fewer are left."""
        if len(view) > self.remaining:
            raise self.corrupt("it was truncated")
        while len(view):
            count = self._file.readinto(view)  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise self.corrupt("it was truncated")
            self.remaining -= count
            view = view[count:]

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes. Raises CorruptFile if fewer are left."""
        if count > self.remaining:  # checked before memory is allocated
            raise self.corrupt("it was truncated")
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def check(self, data: bytes | memoryview) -> bytes:
        """Compare bytes with the checksum that follows in the file, and return the checksum."""
        digest = self.take(DIGEST_BYTES)
        if hashlib.sha256(data).digest() != digest:
            raise self.corrupt("a checksum is wrong")
        return digest

    def read_section(self, max_bytes: int) -> tuple[bytes, bytes]:
        """Read a section of at most `max_bytes` bytes. Returns its bytes and their checksum."""
        if (size := int.from_bytes(self.take(8), "little")) > max_bytes:  # the file may be sparse, and memory is not
            raise self.corrupt(f"a part of {size:,} bytes, where there are {max_bytes:,} at most")
        data = self.take(size)
        return data, self.check(data)

    def check_magic(self, own: bytes, earlier: tuple[bytes, ...], what: str) -> None:
        """Read and check the magic bytes. Raises CorruptFile for another kind of file."""
        found = self.take(min(len(own), self.remaining))
        if found.startswith(earlier):
            raise CorruptFile(
                f"{self.path}: this {what} was saved by an earlier version of Twostroke: make it again with this one"
            )
        if found != own:
            kind, _, version = found.rpartition(b"-")
            if kind == own.rpartition(b"-")[0] and version[:1].isdigit():
                raise CorruptFile(
                    f"{self.path}: this {what} was saved by a later version of Twostroke: load it with that one"
                )
            raise CorruptFile(f"{self.path}: this is not a {what} saved by Twostroke")

    def corrupt(self, why: str) -> CorruptFile:
        return CorruptFile(f"{self.path}: the file is damaged, delete it: {why}")


@contextmanager
def opened(path: Path) -> Generator[StreamReader]:
    """Open a file to read. Raises KVError if it cannot be read."""
    try:
        check_file_name(path)
        path = Path(os.path.expanduser(path))
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe might never end, or never begin
            raise KVError(f"{path}: it cannot be read: it is not a regular file")
        with path.open("rb", buffering=0) as file:
            yield StreamReader(file, path, status.st_size)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        raise KVError(f"{path}: it cannot be read: {error.strerror}") from None


@contextmanager
def saving(path: Path) -> Generator[BinaryIO]:
    """Open a file to write (`system.save`). Raises KVError if it cannot be written."""
    try:
        with atomic_replace(path) as out:
            yield out
    except OSError as error:
        raise KVError(f"{path}: it cannot be saved: {error.strerror}") from None


def write_section(out: BinaryIO, data: bytes | memoryview) -> bytes:
    """Write a section and return its checksum."""
    digest = hashlib.sha256(data).digest()
    out.write(len(data).to_bytes(8, "little"))
    out.write(data)
    out.write(digest)
    return digest


def write(out: BinaryIO, pool: PagePool, contents: EntryTable) -> None:
    """Write a value whose pages belong to the pool, in any tier."""
    table, tail = contents.table, contents.tail
    pages, stops = contents.pages_and_stops(pool.page_size)
    logits = None if tail is None else tail.logits
    logits = np.asarray([] if logits is None else logits, np.float32)
    said = contents.in_pages(pages, np.arange(len(pages)))
    header = StreamHeader(pool.geometry, pool.page_size, pool.memory.layout, len(pages), said, len(logits))
    out.write(MAGIC)
    digests = [write_section(out, headers.encode(header))]
    used, sizes = spans.used_slots(table), dict[int, int]()
    for one in contents.snapshots:
        sizes |= zip(one.pages.tolist(), pool.geometry.state_pages(pool.page_size).used_bytes, strict=False)
    with reading(pool, pages, stops) as sources:
        for page, source in zip(pages.tolist(), sources, strict=True):
            data, size = source.data(), sizes.get(page)
            if page in used:
                group, slots = used[page]
                data, size = masked_page(pool, group, data, slots), pool.geometry.group_bytes[group] * pool.page_size
            if size != len(data):  # what follows belongs to nobody
                data = memoryview(bytes(data[:size]).ljust(len(data), b"\0"))
            digests.append(hashlib.sha256(data).digest())
            out.write(data)
            out.write(digests[-1])
    digests.append(write_section(out, logits.tobytes()))
    key = user_key(make=True)
    write_section(out, b"" if key is None else _seal(digests, key))


def read(source: StreamReader, pool: PagePool) -> EntryTable:
    """Read a value into fresh pages of a pool, each with one reference that the caller must release.

    Raises:
        CorruptFile: not such a stream, truncated, altered or hostile. GeometryMismatch: of another geometry.
        OutOfPages: no room. KVError: the page sizes differ. After an error nothing has changed.
    """
    source.check_magic(MAGIC, OLD_MAGICS, "KV cache")
    text, digest = source.read_section(MAX_HEADER)
    try:
        header = headers.decode(text)
    except InvalidHeader as error:
        raise source.corrupt(str(error)) from None
    pool.geometry.require(header.geometry, f"{source.path}: this value cannot be placed here")
    require_page_size(pool, header.page_size, f"{source.path}: this value")
    rest = 4 * header.num_logits + 2 * (8 + DIGEST_BYTES)
    without_seal = header.num_pages * (pool.page_bytes + DIGEST_BYTES) + rest
    if source.remaining not in (without_seal, without_seal + DIGEST_BYTES):
        raise source.corrupt("its size is not what its header says")
    pool.make_room(header.num_pages, collect=True)
    groups = spans.page_groups(header.contents.table, header.num_pages)
    groups[header.contents.snapshot_pages] = pool.num_groups
    pages = np.array(pool.allocate(header.num_pages, groups), np.int64)
    try:
        contents = _read_pages(source, pool, header, pages, [digest])
        contents = contents.in_pages(np.arange(len(pages)), pages)
        for page, stop in zip(*(one.tolist() for one in contents.pages_and_stops(pool.page_size)), strict=True):
            pool.claim(page, 0, stop)
        return contents
    except BaseException:
        for page in pages.tolist():  # clear what was read, which may include nan: the pages are used again
            pool.put(page, bytes(pool.page_bytes), 0)
        pool.release(pages)
        raise


def _read_pages(
    source: StreamReader, pool: PagePool, header: StreamHeader, pages: np.ndarray, digests: list[bytes]
) -> EntryTable:
    contents = header.contents
    used = spans.used_slots(contents.table)
    for i, page in enumerate(pages.tolist()):
        if header.layout == pool.memory.layout:
            with pool.memory.filling(pool.frame(page)) as view:
                source.fill(view)
                digests.append(source.check(view))
        else:
            data = np.empty(pool.page_bytes, np.uint8)
            source.fill(data.data)
            digests.append(source.check(data.data))
            moved = data.data
            if i in used and pool.geometry.has_layout(used[i][0]):
                moved = in_layout(pool, used[i][0], data, header.layout, used[i][1], pool.memory.layout)
            pool.put(page, moved, 0)
    logits, digest = source.read_section(4 * header.num_logits)
    seal, _ = source.read_section(MAX_SEAL)
    if len(logits) != 4 * header.num_logits or source.remaining:
        raise source.corrupt("its size is not what its header says")
    if not any(hmac.compare_digest(seal, _seal([*digests, digest], key)) for key in user_keys(make=False)):
        return _untrusted(source, pool, contents, pages)
    if contents.tail is None or not header.num_logits:
        return contents
    row = StoredLogits(np.frombuffer(logits, np.float32)[None])
    return replace(contents, tail=replace(contents.tail, row=row))


def _untrusted(source: StreamReader, pool: PagePool, contents: EntryTable, pages: np.ndarray) -> EntryTable:
    """The contents without provenance and logits. K and V must be finite: in reused pages, 0 times nan is nan."""
    log.warning("%s: not sealed by this user: its entries are used, but are canonical for no model", source.path)
    for page in pages.tolist():
        group = int(pool.group_of[page])
        if group < pool.num_groups and not pool.geometry.has_layout(group):
            continue  # rows hold more than numbers of this type, and no other value reads them
        if group < pool.num_groups:
            slots = np.arange(pool.page_size)
            stored = pool.memory.read(group, np.full(len(slots), pool.frame(page)), slots)
            finite = np.isfinite(pool.geometry.stored.decode(stored)).all()
        else:
            states = pool.memory.read_pages([pool.frame(page)])[0]
            finite = np.isfinite(np.frombuffer(states, np.float32)).all()
        if not finite:
            raise source.corrupt("keys, values or states are not finite")
    tail = contents.tail if contents.tail is None or contents.tail.pending is not None else None
    count = len(contents.tokens)
    return replace(contents, stretches=(Stretch(count, None, NOTHING),) if count else (), tail=tail)


def _seal(digests: list[bytes], key: bytes) -> bytes:
    return hashlib.blake2b(b"".join(digests), key=key, digest_size=DIGEST_BYTES, person=b"twostroke-kv").digest()
