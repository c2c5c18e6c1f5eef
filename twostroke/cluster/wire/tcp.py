"""Pages over the channel itself: from the sender's pool to a socket, and from a socket into the receiver's pool."""

from typing import Any

from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.transport import PageReader


class Tcp:
    """The transport that is always there."""

    name = "tcp"

    def memory(self) -> None:
        return None

    def reader(self, memory: dict[str, Any]) -> PageReader:
        raise WireError("no memory is read over TCP")

    def close(self) -> None:
        """There is nothing to close."""
