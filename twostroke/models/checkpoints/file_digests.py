"""Digests of whole weight files, computed once and cached in a file under `home()`.

A cached digest is valid while the file's path, device, inode, size, mtime and ctime are unchanged. The cache is
optional: if it is damaged, cannot be written, or another process writes it at the same time, files are hashed again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from twostroke.errors import CheckpointError
from twostroke.system.atomic_files import atomic_replace
from twostroke.system.home import home

if TYPE_CHECKING:  # importing numpy would slow down every command
    from twostroke.system.mapped_files import MappedFile

BLOCK = 8 << 20  # bytes read at a time
SMALL = 8 << 20  # bytes; smaller files are hashed as quickly as the cache is read
RECENT_NS = 1_000_000_000  # a file changed less than this ago may change again with the same timestamps
MAX_ENTRIES = 512  # files in the cache

State: TypeAlias = tuple[int, ...]  # of a file: device, inode, size, mtime_ns, ctime_ns

known_digests: dict[tuple[str, State], str] = {}  # digests that this process has found


def file_digest(file: "MappedFile") -> str:
    """The sha256 of all bytes of a mapped file, in hex.

    Raises CheckpointError if the file cannot be read, or changes while it is read.
    """
    path, state = _path(file.path), file_state(os.fstat(file.fd))
    if (found := known_digests.get((path, state))) is not None:
        return found
    worthwhile = os.fstat(file.fd).st_size >= SMALL
    found = _remembered(path, state) if worthwhile else None
    if found is None:
        found = read_unchanged(file, state)
        if worthwhile and _is_settled(state):
            _remember(path, state, found)
    if _is_settled(state):
        known_digests[path, state] = found
    return found


def remember(path: Path, digest: str) -> None:
    """Cache the sha256 of a file that was just written and verified, so that it is not hashed again."""
    with suppress(OSError):
        _remember(_path(path), file_state(path.stat()), digest)


def read_digest(path: Path, progress: Callable[[int], None]) -> str:
    """The sha256 of a file's bytes as they are now, in hex. `progress` is called with the number of bytes read.

    Raises CheckpointError if the file cannot be read.
    """
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                done += len(block)
                progress(done)
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be read ({error.strerror or error}): check its disk") from error
    return digest.hexdigest()


def recorded_digest(path: Path) -> str | None:
    """The sha256 that the file had when it was last opened here, also if it was changed since; None if unknown."""
    match _read_note().get(_path(path)):
        case {"sha256": str(digest)} if len(digest) == 64:
            return digest
        case _:
            return None


def read_unchanged(file: "MappedFile", state: State) -> str:
    digest, offset = hashlib.sha256(), 0
    try:
        while block := os.pread(file.fd, BLOCK, offset):
            digest.update(block)
            offset += len(block)
    except OSError as error:
        raise CheckpointError(f"{file.path}: it cannot be read ({error.strerror or error}): check its disk") from error
    if file_state(os.fstat(file.fd)) != state:
        raise CheckpointError(f"{file.path}: the file was changed while it was read: open it again")
    return digest.hexdigest()


def _path(path: Path) -> str:
    return str(path.absolute())


def file_state(stat: os.stat_result) -> State:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _is_settled(state: State) -> bool:
    return time.time_ns() - max(state[-2:]) > RECENT_NS


def _note() -> Path:
    return home() / "digests.json"


def _remembered(path: str, state: State) -> str | None:
    entry = _read_note().get(path)
    match entry:
        case {"state": found, "sha256": str(digest)} if found == list(state) and len(digest) == 64:
            return digest
        case _:
            return None


def _read_note() -> dict[str, object]:
    try:
        found = json.loads(_note().read_bytes())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: this user has no home, or JSON is nested too deeply
        return {}
    return found if isinstance(found, dict) else {}


def _remember(path: str, state: State, digest: str) -> None:
    """Add an entry. Entries of files that no longer exist, and the oldest beyond `MAX_ENTRIES`, are dropped."""
    entries = {old: entry for old, entry in _read_note().items() if old != path and os.path.exists(old)}
    entries[path] = {"state": list(state), "sha256": digest}
    text = json.dumps(dict(list(entries.items())[-MAX_ENTRIES:]), indent=1)
    with suppress(OSError, RuntimeError):
        _note().parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(_note()) as out:
            out.write(text.encode())
