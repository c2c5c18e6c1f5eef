"""Where a server listens: a host and port or a unix socket, plain or with TLS; checked before a model loads."""

import socket
import ssl
from dataclasses import dataclass

from twostroke.server.sockets import address_text, listen
from twostroke.server.tls import tls_context
from twostroke.server.unix_socket import listen_unix, remove_unix


@dataclass(frozen=True)
class Listener:
    """Sockets that listen."""

    sockets: list[socket.socket]
    url: str  # of the server, without a path; for people alone if it is that of a unix socket
    host: str | None  # at which it listens; None for a unix socket, which no browser reaches
    path: str | None  # the unix socket's
    tls: ssl.SSLContext | None

    def close(self) -> None:
        """Close the sockets, and remove the file of a unix socket."""
        for sock in self.sockets:
            sock.close()
        if self.path is not None:
            remove_unix(self.path)


@dataclass(frozen=True)
class Place:
    """Where to listen, as the options say it. `mode`: of the unix socket's file, which goes before host and port."""

    host: str
    port: int
    uds: str | None = None
    mode: int = 0o600
    certificate: str | None = None
    key: str | None = None

    def check(self) -> ssl.SSLContext | None:
        """What serves TLS. Raises InvalidRequest for files that cannot be used."""
        return tls_context(self.certificate, self.key)

    def text(self, port: int | None = None) -> str:
        """The URL, without a path; `port` is the one that was found, if any was to be."""
        scheme = "https" if self.certificate else "http"
        where = address_text(self.host, self.port if port is None else port)
        return f"{scheme}+unix:{self.uds}" if self.uds else f"{scheme}://{where}"

    def open(self) -> Listener:
        """Listen. Raises InvalidRequest, one line, if that cannot be."""
        tls = self.check()
        if self.uds is not None:
            return Listener([listen_unix(self.uds, self.mode)], self.text(), None, self.uds, tls)
        sockets = listen(self.host, self.port)
        return Listener(sockets, self.text(sockets[0].getsockname()[1]), self.host, None, tls)
