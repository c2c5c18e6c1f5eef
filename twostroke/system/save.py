"""Files that are replaced as a whole or not at all, as a user expects of a program that saves."""

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Write a file anew; a crash, an error or a full disk leaves what was there before, and nothing beside it.

    A symbolic link is followed, and stays. A file that is there keeps its mode; a new one gets what the umask allows.

    Raises:
        OSError: the target is no regular file, may not be written to, or its directory is not there; `strerror` says
            so.
    """
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, f"there is no directory {target.parent}: make it first")
    partial = target.with_name(f".twostroke-{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as out:
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            yield out
            out.flush()
            os.fsync(out.fileno())  # or the new name might survive a power failure, and its bytes not
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)  # it is gone already unless something failed


def _mode(target: Path) -> int | None:
    """Of what is there, which must be a file that can be replaced."""
    try:
        mode = target.lstat().st_mode  # a link that is still one is a circle
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {kind}: name a file")
    if not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(mode)
