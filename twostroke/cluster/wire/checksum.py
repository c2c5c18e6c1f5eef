"""What shows that bytes have arrived as they were sent.

Between machines it is BLAKE3. Its digests travel in messages that the secret authenticates, so nobody on the network
can change a page unseen. Within one machine there is no network between the two. There a read can be late or
damaged, and XXH3 with 128 bits (github.com/Cyan4973/xxHash) finds that several times as quickly.
"""

from typing import Literal

from blake3 import blake3
from xxhash import xxh3_128

Kind = Literal["blake3", "xxh3"]


def kind_between(here: str | None, there: str | None) -> Kind:
    """The kind for bytes from one machine to another, by their names (`Channel.machine`)."""
    return "xxh3" if here == there and here is not None else "blake3"


def checksum(data: memoryview, kind: Kind) -> str:
    """The kind, and 32 hex digits. Python's lock is not held while they are made."""
    if kind == "xxh3":
        return f"xxh3:{xxh3_128(data).hexdigest()}"
    return f"blake3:{blake3(data).hexdigest(length=16)}"


def is_right(data: memoryview, wanted: str) -> bool:
    """Whether bytes have a checksum, of whichever kind it is."""
    return checksum(data, "xxh3" if wanted.startswith("xxh3:") else "blake3") == wanted
