"""Atomic replacement of files: the old contents stay until the new ones are complete."""

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def check_file_name(path: Path) -> None:
    """Raise OSError if the system can have no file of that name: a null character, or what is no text."""
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise OSError(errno.EINVAL, "no file can have this name")


def check_replaceable(path: Path) -> tuple[Path, int | None]:
    """The file that `atomic_replace` would write, and its mode if it exists; raises what that would raise at once."""
    check_file_name(path)
    target = Path(os.path.realpath(os.path.expanduser(path)))
    mode = _mode(target)
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, f"there is no directory {target.parent}: make it first")
    return target, mode


@contextmanager
def atomic_replace(path: Path) -> Generator[BinaryIO]:
    """Write a new version of a file. A crash, an error or a full disk leaves the old version, and no partial file.

    A symbolic link is followed and kept. An existing file keeps its mode; a new one gets the default mode of the umask.

    Raises:
        OSError: the name is impossible, the target is not a regular file, is not writable, or its directory is missing;
            see `strerror`.
    """
    target, mode = check_replaceable(path)
    partial = target.with_name(f".twostroke-{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as out:
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            yield out
            out.flush()
            os.fsync(out.fileno())  # else a power failure might keep the new name without its bytes
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)  # it exists only if something failed


def _mode(target: Path) -> int | None:
    """The mode of an existing file, which must be replaceable; None if there is none."""
    try:
        mode = target.lstat().st_mode  # realpath leaves only circular links
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {kind}: name a file")
    if not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(mode)
