"""Pages over the channel itself: from the sender's pool to a socket, and from a socket into the receiver's pool.

The receiver's own thread reads them into its memory. So nothing can be written there after that thread has turned away.
"""

from collections.abc import Sequence
from typing import Any

from twostroke.kv.moves import Source
from twostroke.wire import form
from twostroke.wire.channel import Channel
from twostroke.wire.transport import Digests, Grant


class Tcp:
    """The transport that is always there."""

    name = "tcp"
    late = False

    def claim(self) -> dict[str, Any]:
        return {}

    def places(self, frames: Sequence[int]) -> list[int]:
        return [0] * len(frames)

    def writer(self, claim: dict[str, Any], channel: Channel) -> "TcpWriter":
        return TcpWriter(channel)

    def arrived(self, tag: str, limit_s: float) -> None:
        """Pages come with their message."""

    def close(self) -> None:
        """There is nothing to close."""


class TcpWriter:
    """Sends pages behind their message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def write(self, numbers: Sequence[int], sources: Sequence[Source], grant: Grant, digests: Digests) -> None:
        for some in form.pieces(len(sources), form.piece(sources)):
            views = [source.data() for source in sources[some]]
            about: dict[str, Any] = {"numbers": list(numbers[some]), "digests": digests(numbers[some])}
            self._channel.send("pages", views, **about, generation=grant.generation, inline=True, tag="")
