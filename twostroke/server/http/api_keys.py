"""The keys that clients must send: one by itself, or several with names in a file that may change meanwhile."""

import hmac
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.errors import InvalidRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiKey:
    """A key and its name, which is in the log's lines of the calls made with it; "" without a name."""

    key: str
    name: str = ""


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file: `KEY` or `NAME KEY` on each line; empty lines and those that begin with # are skipped.

    Raises InvalidRequest if it cannot be read, has no key, or has a line of another form.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InvalidRequest(f"the file of API keys, {path}, cannot be read: {reason}") from None
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        match line.split():
            case []:
                continue
            case [first, *_] if first.startswith("#"):
                continue
            case [key]:
                keys.append(ApiKey(key))
            case [name, key]:
                keys.append(ApiKey(key, name))
            case _:
                raise InvalidRequest(f"the file of API keys, {path}: line {number} must be KEY, or NAME KEY")
    if not keys:
        raise InvalidRequest(f"the file of API keys, {path}, has no key: write one on a line of its own")
    return keys


class ApiKeys:
    """The accepted keys. A file is looked at with every call, so a key can be added or taken back while serving."""

    def __init__(self, key: str | None = None, file: str | None = None) -> None:
        """Raises InvalidRequest, see `read_keys`."""
        self._own = [] if key is None else [ApiKey(key)]
        self._file = None if file is None else Path(file).expanduser()
        self._version = self._file_version()
        self._from_file = [] if self._file is None else read_keys(self._file)

    @property
    def required(self) -> bool:
        """Whether calls need a key."""
        return bool(self._own or self._file)

    def find(self, headers: Mapping[str, str]) -> ApiKey | None:
        """The key that a call has: a bearer token, or x-api-key, which is Anthropic's way."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        found: ApiKey | None = None
        for known in self._accepted():
            # A comparison in constant time: otherwise a key could be guessed one character at a time.
            if any(
                hmac.compare_digest(one.strip(" \t").encode("latin-1", "replace"), known.key.encode()) for one in given
            ):
                found = known
        return found

    def _accepted(self) -> Sequence[ApiKey]:
        if self._file is not None and (version := self._file_version()) != self._version:
            self._version = version
            try:
                self._from_file = read_keys(self._file)
                log.info("the file of API keys has changed: %d keys are accepted", len(self._from_file))
            except InvalidRequest as error:
                log.error("%s; the keys that it had before are still accepted", error)
        return [*self._own, *self._from_file]

    def _file_version(self) -> tuple[int, int, int] | None:
        """A version of the file: it changes with a write in place, and with another file under the name."""
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)
