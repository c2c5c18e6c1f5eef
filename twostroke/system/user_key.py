"""The user's keys, which seal saved values and pages, so that they can be trusted when they are read again.

Anyone who has one can make files that this user's programs trust. The first key seals; all of them verify, so that a
key can be replaced: put the new one behind the old one everywhere, then before it, then alone.

    TWOSTROKE_KEY         secrets of at least 16 characters, separated by commas
    TWOSTROKE_KEY_FILE    the path of a file, such as a secret that is mounted by Kubernetes
    key                   a file in this user's data; it is made on first use, readable by its user only

A file holds 32 bytes for each key, one after another.
"""

import hashlib
import hmac
import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from twostroke.system.home import home

log = logging.getLogger(__name__)
KEY_BYTES = 32
MAX_KEYS = 8
MIN_CHARACTERS = 16  # of a secret: whoever sees a seal can try guesses
VARIABLE, FILE_VARIABLE = "TWOSTROKE_KEY", "TWOSTROKE_KEY_FILE"
UNUSABLE = "the key cannot be used, so saved values are not trusted"


def user_key(make: bool) -> bytes | None:
    """The key that seals. If there is none it is made if `make`, else None; see `user_keys`."""
    return next(iter(user_keys(make)), None)


def user_keys(make: bool) -> tuple[bytes, ...]:
    """All keys, the one that seals first. Empty, with a logged warning, if they cannot be used."""
    if (stated := os.environ.get(VARIABLE)) is not None:
        return _of_secrets(stated)
    path = Path("key")
    try:
        given = os.environ.get(FILE_VARIABLE)
        path = home() / path if given is None else Path(os.path.expanduser(given))
        if make and given is None and not path.exists():
            _make(path)
        with path.open("rb") as file:
            _check_access(os.fstat(file.fileno()))
            data = file.read(KEY_BYTES * MAX_KEYS + 1)
    except FileNotFoundError as error:
        if os.environ.get(FILE_VARIABLE) is not None:
            log.warning("%s: %s: %s", path, UNUSABLE, error.strerror)
        return ()  # nothing was sealed yet
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        why = error.strerror if isinstance(error, OSError) else error
        log.warning("%s: %s: %s", path, UNUSABLE, why)
        return ()
    if not data or len(data) % KEY_BYTES or len(data) > KEY_BYTES * MAX_KEYS:
        log.warning("%s: this is not a key, so saved values are not trusted: delete it, and a new one is made", path)
        return ()
    return tuple(data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES))


def seal(text: bytes, purpose: bytes) -> str | None:
    """A keyed hash of a text, which whoever has one of the keys can verify; None if there is no key.

    `purpose`: what the text is, at most 16 bytes: a seal of another purpose is none.
    """
    key = user_key(make=True)
    return None if key is None else _keyed(text, purpose, key)


def sealed(text: bytes, purpose: bytes, seal: str) -> bool:
    """Whether one of the user's keys has made this seal of the text."""
    made = [_keyed(text, purpose, key).encode() for key in user_keys(make=False)]
    return any(hmac.compare_digest(one, seal.encode(errors="surrogatepass")) for one in made)


def _keyed(text: bytes, purpose: bytes, key: bytes) -> str:
    return hashlib.blake2b(text, key=key, digest_size=32, person=purpose).hexdigest()


def _of_secrets(stated: str) -> tuple[bytes, ...]:
    """Keys made from secrets."""
    words = [word.strip() for word in stated.split(",")]
    if min(map(len, words)) < MIN_CHARACTERS:
        log.warning("%s: %s: give at least %d random characters", VARIABLE, UNUSABLE, MIN_CHARACTERS)
        return ()
    return tuple(
        hashlib.blake2b(word.encode(), digest_size=KEY_BYTES, person=b"twostroke-key").digest() for word in words
    )


def _check_access(status: os.stat_result) -> None:
    """Raise PermissionError for a file that others may read or change.

    A group may read what nobody in it can change: a file of root's (0440, a secret of Kubernetes with `fsGroup`), or
    one that is read-only for its owner too.
    """
    mode, own = stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()
    group_reads = not own or not mode & 0o200
    allowed = 0o740 if group_reads else 0o700
    if not stat.S_ISREG(status.st_mode) or not (own or status.st_uid == 0) or mode & ~allowed & 0o777:
        raise PermissionError(0, "others have access to it: chmod 600 it, or delete it, and a new one is made")


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
