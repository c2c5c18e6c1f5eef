"""What pages outside of a pool are called: by what they hold, or by chance.

A *canonical* page's bits depend on its model's identity and on the tokens up to its end, and on nothing else. So its
key is a chained digest of these, and everybody who looks for those tokens finds it. A *private* page belongs to one
value of one process and has a random key.
"""

import hashlib
import secrets
from dataclasses import dataclass
from functools import cached_property

import numpy as np

KEY_BYTES = 32
_STATE = b"state"


@dataclass(frozen=True)
class Namespace:
    """What pages have in common that may stand for each other."""

    model: str  # its checkpoint's name, for people only
    identity: str  # `Model.id`, which covers everything that an entry's bits depend on besides the tokens before it
    geometry: str  # fingerprint of the KV geometry
    layout: str  # order of a page's elements (`backends.memory`)
    # page_size, page_bytes: entries and bytes of a page
    page_size: int
    page_bytes: int

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for all of it except the model's name."""
        parts = (self.identity, self.geometry, self.layout, self.page_size, self.page_bytes)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16, person=b"twostroke-pages").digest()


@dataclass(frozen=True, slots=True)
class PageName:
    """A page of a prompt, or a part of a snapshot of states behind one."""

    key: bytes  # digest of `parent` and `tokens`, 32 bytes
    parent: bytes  # key of the page before it; the first page's is the namespace's digest, padded with zeros
    number: int  # which page of its prompt it is, from 0
    tokens: bytes  # its tokens, int32, little endian; of a snapshot, which part of it this is

    @property
    def right(self) -> bool:
        """Whether the key is the digest of what it says."""
        return self.key == digest(self.parent, self.tokens)

    @property
    def of_state(self) -> bool:
        """Whether it is a part of a snapshot. No vocabulary is so large that tokens look like this."""
        return self.tokens.startswith(_STATE)


def digest(parent: bytes, tokens: bytes) -> bytes:
    """The key of the page that holds `tokens` after the page `parent`."""
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


def chain(namespace: Namespace, tokens: np.ndarray) -> list[PageName]:
    """The names of the whole pages of a prompt (int32, from position 0)."""
    size, names = namespace.page_size, []
    parent = namespace.digest.ljust(KEY_BYTES, b"\0")
    for number in range(len(tokens) // size):
        own = tokens[number * size : (number + 1) * size].astype("<i4").tobytes()
        key = digest(parent, own)
        names.append(PageName(key, parent, number, own))
        parent = key
    return names


def snapshot_names(page: PageName, count: int) -> list[PageName]:
    """The names of the `count` parts of the snapshot of states behind a page of a prompt."""
    parts = (_STATE + number.to_bytes(4, "little") for number in range(count))
    return [PageName(digest(page.key, part), page.key, page.number + 1, part) for part in parts]


def private_name() -> PageName:
    """A name that nobody else has, for a page that belongs to one value."""
    return PageName(secrets.token_bytes(KEY_BYTES), bytes(KEY_BYTES), 0, b"")
