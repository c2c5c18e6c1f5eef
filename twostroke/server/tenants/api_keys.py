"""The keys that clients must send: one by itself, or several with names in a file that may change meanwhile."""

import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from twostroke.errors import InvalidRequest
from twostroke.server.tenants.key_file import ApiKey, digest_of, read_keys
from twostroke.server.tenants.tenant import EVERYBODY, Tenant

log = logging.getLogger(__name__)


class ApiKeys:
    """The accepted keys. A file is looked at with every call, so a key can be added or taken back while serving."""

    def __init__(
        self, key: str | None = None, file: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises InvalidRequest, see `read_keys`. `clock` is that of limits, in seconds."""
        self._own = [] if key is None else [ApiKey.of(key)]
        self._file = None if file is None else Path(file).expanduser()
        self._clock = clock
        self._version = self._file_version()
        self._from_file: Sequence[ApiKey] = []
        self._tenants: dict[str, Tenant] = {}
        if self._file is not None:
            self._accept(read_keys(self._file))

    @property
    def required(self) -> bool:
        """Whether calls need a key."""
        return bool(self._own or self._file)

    @property
    def tenants(self) -> list[Tenant]:
        """Those that have names, which are the file's."""
        return list(self._tenants.values())

    def find(self, headers: Mapping[str, str]) -> Tenant | None:
        """Whose key a call has: a bearer token, or x-api-key, which is Anthropic's way."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        digests = [digest_of(one.strip(" \t").encode("latin-1", "replace")) for one in given]
        found: ApiKey | None = None
        for known in self._accepted():
            # Every digest is compared, in constant time: a duration tells nothing about a key.
            if sum(hmac.compare_digest(one, known.digest) for one in digests):
                found = known
        return None if found is None else self._tenants.get(found.name, EVERYBODY)

    def _accepted(self) -> Sequence[ApiKey]:
        if self._file is not None and (version := self._file_version()) != self._version:
            self._version = version
            try:
                self._accept(read_keys(self._file))
                log.info("the file of API keys has changed: %d keys are accepted", len(self._from_file))
            except InvalidRequest as error:
                log.error("%s; the keys that it had before are still accepted", error)
        return [*self._own, *self._from_file]

    def _accept(self, keys: Sequence[ApiKey]) -> None:
        """Take other keys. A name that stays goes on with what it has used."""
        before, self._from_file, self._tenants = self._tenants, keys, {}
        for key in keys:
            if key.name and key.name not in self._tenants:
                tenant = before.get(key.name) or Tenant(key.name, key.limits, self._clock)
                tenant.limit(key.limits)
                self._tenants[key.name] = tenant

    def _file_version(self) -> tuple[int, int, int] | None:
        """A version of the file: it changes with a write in place, and with another file under the name."""
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)
