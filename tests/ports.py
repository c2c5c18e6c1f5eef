"""Ports of the loopback interface for servers that are started later, or again."""

import socket
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Generator[int]:
    """A port that the system gives to nobody meanwhile. A server may listen there, as all set SO_REUSEADDR."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]
