"""Sockets that listen, bound before the model is loaded: a taken port is found at once."""

import errno
import socket

from twostroke.errors import InvalidRequest

MAX_PENDING_CONNECTIONS = 2048  # not accepted yet (listen(2))


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at every address of a host; port 0 is a free one.

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
        raise InvalidRequest(f"cannot listen at {address_text(host, port)}: {_reason(error)}") from None
    return sockets


def address_text(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError | socket.gaierror):
        return "there is no such host: give this machine's address or name with --host"
    if error.errno == errno.EADDRINUSE:
        return "the port is taken: stop what listens there, or choose another with --port"
    if error.errno == errno.EACCES:
        return "this user may not listen there: choose a --port of 1024 or more"
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address is not one of this machine's: give one that is with --host"
    return error.strerror or str(error)
