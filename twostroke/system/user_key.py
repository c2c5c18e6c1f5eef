"""The user's key, which seals saved values, so that they can be trusted when they are loaded again.

It is made on first use, readable by its user only. Anyone who has it can make files that this user's programs trust.
"""

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from twostroke.system.home import home

log = logging.getLogger(__name__)
KEY_BYTES = 32


def user_key(make: bool) -> bytes | None:
    """The key. If it is missing it is made if `make`, else None; None with a logged warning if it cannot be used."""
    path = Path("key")
    try:
        path = home() / path
        if make and not path.exists():
            _make(path)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o77:
                raise PermissionError(0, "others have access to it: chmod 600 it, or delete it, and a new one is made")
            key = file.read(KEY_BYTES + 1)
    except FileNotFoundError:
        return None  # nothing was sealed yet
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        why = error.strerror if isinstance(error, OSError) else error
        log.warning("%s: the key cannot be used, so saved values are not trusted: %s", path, why)
        return None
    if len(key) != KEY_BYTES:
        log.warning("%s: this is not a key, so saved values are not trusted: delete it, and a new one is made", path)
        return None
    return key


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"key.{secrets.token_hex(8)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):  # another process was first: its key is used
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
