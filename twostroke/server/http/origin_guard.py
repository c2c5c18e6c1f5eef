"""Keeps pages of other sites away from a server without a key.

Any page can make its reader's browser send requests to this machine. Two ways lead in, and a key closes both:

- DNS rebinding (as in CVE-2024-28224): the page's own name is made to stand for 127.0.0.1, so the browser takes this
  server for the page's. The header Host still has that name.
- Forms and other requests for which a browser asks no permission (CORS). Browsers say in the headers Origin and
  Sec-Fetch-Site where a request comes from, and a page can give such a request only the content types of forms.

An address in Host cannot be rebound, so it is refused on the loopback interface alone, where no client needs it.
"""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers

from twostroke.server.errors import ApiError

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})


@dataclass(frozen=True)
class OriginGuard:
    """Decides about calls by their headers."""

    hosts: frozenset[str] | None  # names that the header Host may have; None for every name
    addresses: bool  # Host may be an address, whichever it is
    origins: frozenset[str]  # other origins whose pages may call; "*" for all

    @classmethod
    def for_address(cls, host: str, allowed_hosts: Iterable[str], origins: Iterable[str]) -> "OriginGuard":
        """The guard of a server that listens at a host. Names are checked on loopback, or where some are given."""
        loopback, allowed = _is_loopback(host), {one.strip("[]").lower() for one in allowed_hosts}
        checked = "*" not in allowed and (loopback or bool(allowed))
        hosts = _LOOPBACK | allowed | {host.lower()} if checked else None
        return cls(hosts, not loopback, frozenset(one.lower() for one in origins))

    def refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """The error (403) for a call that a page of another site may have sent."""
        for host in headers.getlist("host"):
            if not self._serves(host):
                message = f"this server is not reached as {host!r:.100}: serve with --allowed-host, or with an API key"
                return ApiError(403, message, code="host_not_allowed")
        if method in _SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin is not None:
            if self._is_own(origin, headers.get("host", "")):
                return None
            return self._cross_site(f"a page of {origin!r:.100} may not call this server")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return self._cross_site("a page of another site may not call this server")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in _FORM_TYPES and not path.startswith("/api/"):  # curl names it by itself, as Ollama's guide calls it
            return self._cross_site(f"the content type {kind} is that of a form: send application/json")
        return None

    def _serves(self, host: str) -> bool:
        name = _hostname(host)
        return self.hosts is None or name in self.hosts or (self.addresses and _is_address(name))

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether an origin is this server's, or one of those that may call."""
        if "*" in self.origins or origin.lower() in self.origins:
            return True
        return origin.lower().partition("://")[2] == host.lower() != ""  # an origin has no path (RFC 6454, 6.2)

    @staticmethod
    def _cross_site(message: str) -> ApiError:
        hint = "" if "form" in message else ": serve with --cors, or with an API key"
        return ApiError(403, message + hint, code="cross_site")


def _hostname(host: str) -> str:
    """The name or address in a Host header, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    """Whether every address of a host is of the loopback interface."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
