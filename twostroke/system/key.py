"""The user's own key, which seals what is saved, so that it can be believed when it is loaded again.

It is made on first use and can be read by its user alone. Who has it can make files that this user's programs believe.
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
    """The key, made if it is not there and `make`; None, with a warning in the log, where it cannot be used."""
    path = Path("key")
    try:
        path = home() / path
        if make and not path.exists():
            _make(path)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o77:
                raise PermissionError(0, "others have access to it: chmod 600 it, or delete it to have another made")
            key = file.read(KEY_BYTES + 1)
    except FileNotFoundError:
        return None  # nothing was sealed yet
    except (OSError, RuntimeError) as error:  # the latter where there is no home directory
        why = error.strerror if isinstance(error, OSError) else error
        log.warning("%s: the key cannot be used, so saved values are not believed: %s", path, why)
        return None
    if len(key) != KEY_BYTES:
        log.warning("%s: this is no key, so saved values are not believed: delete it to have another made", path)
        return None
    return key


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"key.{secrets.token_hex(8)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):  # another process was first, whose key stands
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
