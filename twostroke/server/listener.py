"""Where a server listens: a host and port or a unix socket, plain or with TLS; checked before a model loads."""

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twostroke.errors import InvalidRequest

MAX_PENDING_CONNECTIONS = 2048  # not accepted yet (listen(2))
MAX_PATH_BYTES = 107  # of Linux (unix(7)); 103 on macOS
NO_HOST = "there is no such host: give this machine's address or name with --host"
HOST_REASONS = {
    errno.EADDRINUSE: "the port is taken: stop what listens there, or choose another with --port",
    errno.EACCES: "this user may not listen there: choose a --port of 1024 or more",
    errno.EADDRNOTAVAIL: "the address is not one of this machine's: give one that is with --host",
}
PATH_REASONS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "there is no such directory: make it first"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "this user may not write there: choose another path with --uds"
    ),
}


@dataclass(frozen=True)
class Listener:
    """Sockets that listen."""

    sockets: list[socket.socket]
    url: str  # of the server, without a path; for people alone if it is that of a unix socket
    host: str | None  # at which it listens; None for a unix socket, which no browser reaches
    path: Path | None  # the unix socket's
    tls: ssl.SSLContext | None

    def close(self) -> None:
        """Close the sockets, and remove the file of a unix socket, unless another server listens there by now."""
        for sock in self.sockets:
            sock.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                if not _answers(self.path):
                    self.path.unlink()


@dataclass(frozen=True)
class Place:
    """Where to listen, as the options say it. `mode`: of the unix socket's file, which goes before host and port."""

    host: str
    port: int
    uds: str | None = None
    mode: int = 0o600
    certificate: str | None = None
    key: str | None = None

    def check(self) -> None:
        """Raise InvalidRequest for what no server could listen at, or with. One may listen there now."""
        _tls_context(self.certificate, self.key)
        if self.uds is not None:
            _require_path(Path(self.uds).expanduser(), self.uds)
            return
        for sock in listen(self.host, 0, _address(self.host, self.port)):
            sock.close()

    def text(self, port: int | None = None) -> str:
        """The URL, without a path; `port` is the one that was found, if any was to be."""
        scheme = "https" if self.certificate else "http"
        where = _address(self.host, self.port if port is None else port)
        return f"{scheme}+unix:{self.uds}" if self.uds else f"{scheme}://{where}"

    def open(self) -> Listener:
        """Listen. Raises InvalidRequest, one line, if that cannot be."""
        tls = _tls_context(self.certificate, self.key)
        if self.uds is not None:
            path = Path(self.uds).expanduser()
            return Listener([_listen_at_path(path, self.uds, self.mode)], self.text(), None, path, tls)
        sockets = listen(self.host, self.port)
        return Listener(sockets, self.text(sockets[0].getsockname()[1]), self.host, None, tls)


def listen(host: str, port: int, named: str | None = None) -> list[socket.socket]:
    """Sockets that listen at every address of a host; port 0 is a free one. `named`: the place as an error names it.

    Raises InvalidRequest, one line: the port is taken, needs rights, or the host is none of this machine's.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            sock.bind((address[0], chosen, *address[2:]))
            sock.listen(MAX_PENDING_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        for sock in sockets:
            sock.close()
        reason = NO_HOST if isinstance(error, UnicodeError | socket.gaierror) else _reason(error, HOST_REASONS)
        raise _refusal(named or _address(host, port), reason) from None
    return sockets


def _address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_at_path(path: Path, named: str, mode: int) -> socket.socket:
    """Listen at a path; what a server that was killed has left there is replaced.

    Args:
        path: of the socket.
        named: the same as the user wrote it.
        mode: its permissions, such as 0o660: who may write to it may connect.

    Raises InvalidRequest, one line: somebody listens there, something else is there, or it cannot be made.
    """
    _require_path(path, named)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777)  # nobody connects until its permissions are set
    try:
        if path.exists():
            if _answers(path):
                raise _refusal(named, "another server listens there: stop it, or choose another path with --uds")
            path.unlink()
        sock.bind(str(path))
        sock.listen(MAX_PENDING_CONNECTIONS)
        path.chmod(mode)
    except (OSError, ValueError) as error:
        sock.close()
        raise _refusal(named, _reason(error, PATH_REASONS)) from None
    except InvalidRequest:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def _require_path(path: Path, named: str) -> None:
    """Raise InvalidRequest where no socket could be."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise _refusal(named, f"a path of a socket has at most {MAX_PATH_BYTES} bytes: choose a shorter one")
    taken = False
    try:
        if not stat.S_ISDIR(path.parent.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with contextlib.suppress(FileNotFoundError):
            taken = not stat.S_ISSOCK(path.lstat().st_mode)
    except (OSError, ValueError) as error:
        raise _refusal(named, _reason(error, PATH_REASONS)) from None
    if taken:
        raise _refusal(named, "there is something else than a socket: remove it, or choose another path with --uds")


def _answers(path: Path) -> bool:
    """Whether somebody listens at a socket's file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue, or no permission: somebody may be there
            return True
        return True


def _refusal(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"cannot listen at {where}: {reason}")


def _reason(error: Exception, known: Mapping[int, str]) -> str:
    number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
    return known.get(number or 0) or text or str(error)


def _tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """What serves TLS; None where neither file is given.

    Args:
        certificate: PEM file with the certificate and those that lead to a root; it may hold the key too.
        key: PEM file with the key, without a passphrase.

    Raises InvalidRequest, one line that names the file: it is missing, no PEM, has a passphrase, or they do not match.
    """
    if certificate is None:
        if key is not None:
            raise InvalidRequest("--ssl-keyfile needs --ssl-certfile: give the certificate of the key too")
        return None
    for option, file in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if file is not None:
            _require_readable(option, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    paths = [str(Path(file).expanduser()) for file in (certificate, key) if file is not None]
    asked: list[bool] = []

    def no_passphrase() -> str:  # OpenSSL would ask at the terminal
        asked.append(True)
        return ""

    try:
        context.load_cert_chain(*paths, password=no_passphrase)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise InvalidRequest(_tls_reason(error, certificate, key, has_passphrase=bool(asked))) from None
    return context


def _require_readable(option: str, file: str) -> None:
    try:
        Path(file).expanduser().open("rb").close()
    except OSError as error:
        raise InvalidRequest(f"{option}: {file} cannot be read ({error.strerror})") from None


def _tls_reason(error: Exception, certificate: str, key: str | None, *, has_passphrase: bool) -> str:
    named = key or certificate
    if has_passphrase:
        return f"{named} has a passphrase: write the key without one (openssl pkey), readable by this user alone"
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"the key in {named} is not that of the certificate in {certificate}: give a pair"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(str(Path(certificate).expanduser()))
    except (ssl.SSLError, OSError):
        return f"--ssl-certfile: {certificate} has no certificate in PEM form"
    if key is None:
        return f"{certificate} has no key: give its file with --ssl-keyfile"
    return f"--ssl-keyfile: {key} has no private key in PEM form"
