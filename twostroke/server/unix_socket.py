"""A listening socket in the file system, for a proxy or programs of the same machine."""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from twostroke.errors import InvalidRequest
from twostroke.server.sockets import MAX_PENDING_CONNECTIONS

MAX_PATH_BYTES = 107  # of Linux (unix(7)); 103 on macOS


def listen_unix(path: str, mode: int) -> socket.socket:
    """Listen at a path; what a server that was killed has left there is replaced.

    Args:
        path: of the socket.
        mode: its permissions, such as 0o660: who may write to it may connect.

    Raises InvalidRequest, one line: somebody listens there, something else is there, or it cannot be made.
    """
    where = Path(path).expanduser()
    if len(os.fsencode(where)) > MAX_PATH_BYTES:
        raise _refusal(path, f"a path of a socket has at most {MAX_PATH_BYTES} bytes: choose a shorter one")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777)  # nobody connects until its permissions are set
    try:
        _remove_stale(where, path)
        sock.bind(str(where))
        sock.listen(MAX_PENDING_CONNECTIONS)
        where.chmod(mode)
    except (OSError, ValueError) as error:
        sock.close()
        raise _refusal(path, _reason(error)) from None
    except InvalidRequest:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def remove_unix(path: str) -> None:
    """Remove the file of a socket that is closed, unless another server listens there by now."""
    where = Path(path).expanduser()
    with contextlib.suppress(OSError):
        if not _answers(where):
            where.unlink()


def _remove_stale(where: Path, path: str) -> None:
    try:
        found = where.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise _refusal(path, "there is something else than a socket: remove it, or choose another path with --uds")
    if _answers(where):
        raise _refusal(path, "another server listens there: stop it, or choose another path with --uds")
    where.unlink()


def _answers(where: Path) -> bool:
    """Whether somebody listens at a socket's file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(where))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue, or no permission: somebody may be there
            return True
        return True


def _refusal(path: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"cannot listen at {path}: {reason}")


def _reason(error: OSError | ValueError) -> str:
    match getattr(error, "errno", None):
        case errno.ENOENT | errno.ENOTDIR:
            return "there is no such directory: make it first"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "this user may not write there: choose another path with --uds"
        case _:
            return getattr(error, "strerror", None) or str(error)
