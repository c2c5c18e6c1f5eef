"""How whole pages get from one pool's memory into another's. Everything else goes over the channel.

The receiver fetches them: with the channel's bytes, or from the sender's memory, if the transport reaches it. So only a
pool's own process writes into it, and a sender that dies or is slow can never reach a page there.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from twostroke.cluster.wire import nixl
from twostroke.cluster.wire.channel import WireError
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

Choice = Literal["auto", "nixl", "tcp"]


class PendingRead(Protocol):
    """Pages that are being read into this pool's memory. It cannot be taken back."""

    def wait(self, limit_s: float) -> bool:
        """Wait until nothing of it is under way any more, at most for so many seconds: with 0 it looks once.

        Returns whether it has ended. Raises WireError: it has ended, and has failed.
        """
        ...


class PageReader(Protocol):
    """Reads from one sender's memory."""

    def begin(self, places: Sequence[int], frames: Sequence[int]) -> PendingRead:
        """Begin to read pages from the sender's places into frames of this pool. Raises WireError."""
        ...


class Transport(Protocol):
    """Moves whole pages. One object serves a pool, for sending and receiving."""

    name: str  # "tcp" or "nixl". Memory is read if both sides have the same one that can.

    def memory(self) -> dict[str, Any] | None:
        """What a receiver needs to read from this pool's memory, for JSON. None: pages go over the channel."""
        ...

    def reader(self, memory: dict[str, Any]) -> PageReader:
        """Reads from the memory of a sender that has told of it. Raises WireError."""
        ...

    def close(self) -> None: ...


class Tcp:
    """The transport that is always there."""

    name = "tcp"

    def memory(self) -> None:
        return None

    def reader(self, memory: dict[str, Any]) -> PageReader:
        raise WireError("no memory is read over TCP")

    def close(self) -> None:
        """There is nothing to close."""


def open_transport(choice: Choice, pool: PagePool) -> Transport:
    """The transport of a pool: NIXL where it is installed, else TCP, which it says once in the log.

    Args:
        choice: "auto", "nixl" or "tcp".
        pool: whose pages move.

    Raises WireError: NIXL was asked for, and cannot be used.
    """
    if choice == "tcp":
        return Tcp()
    if (reason := nixl.unavailable(pool)) is None:
        return nixl.Nixl(pool)
    if choice == "nixl":
        raise WireError(f"NIXL cannot be used: {reason}")
    log.warning("pages go over plain TCP: %s", reason)
    return Tcp()
