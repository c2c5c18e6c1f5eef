"""How whole pages get from one pool's memory into another's. Everything else goes over the channel.

A receiver *grants* places for pages, under a *generation* that no other grant has. A sender writes only to granted
places, and stops before it closes its channel. So a place is given to somebody else only when its writer has
confirmed that it is done, or when its process has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twostroke.kv.moves import Source
from twostroke.wire.channel import Channel


@dataclass
class Grant:
    """What a receiver allows a sender to write to.

    Attributes:
        generation: names the grant.
        places: where each page goes, by its number in the transfer; what a place is, is the transport's matter.
    """

    generation: str
    places: list[int]


Digests = Callable[[Sequence[int]], list[str]]  # of some of the pages that are written, by their numbers


class PageWriter(Protocol):
    """The sender's side of one transfer."""

    def write(self, numbers: Sequence[int], sources: Sequence[Source], grant: Grant, digests: Digests) -> None:
        """Put whole pages into their places, and send the message "pages" with their digests.

        It returns when no byte of them is under way any more. Raises WireError.
        """
        ...


class Transport(Protocol):
    """Moves whole pages. One object serves a pool, for sending and receiving.

    Attributes:
        name: "tcp" or "nixl".
        late: whether bytes may still come after the receiver has turned away, until the sender has stopped.
    """

    name: str
    late: bool

    def claim(self) -> dict[str, Any]:
        """What a receiver tells a sender once, for JSON."""
        ...

    def places(self, frames: Sequence[int]) -> list[int]:
        """Where frames of the pool are, for a grant."""
        ...

    def writer(self, claim: dict[str, Any], channel: Channel) -> PageWriter:
        """The sender's side of a transfer to who has sent the claim. Raises WireError."""
        ...

    def arrived(self, tag: str, limit_s: float) -> None:
        """Wait for the notification that pages have been written. It may be lost: digests decide what has come.

        There is one for all pages of a `PageWriter.write`. With a limit of 0 it looks, and takes it if it is there.
        """
        ...

    def close(self) -> None: ...
