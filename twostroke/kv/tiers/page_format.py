"""What a page says of itself outside of a pool: a header, and a seal over the header and the payload: the entries, or
their compressed form. Who reads a page sees from the payload's size which it is.

The seal is a keyed BLAKE3: a checksum, and a proof that only who has the user's key can make. So a store holds no page
that was changed, that belongs to another model, or that somebody else put there.

The compressed form is exact. Of a bfloat16 number of K or V, the sign and the seven bits behind the leading one are as
good as random, but of the eight bits of its exponent only about three are news: neighbours are of like size. So
exponents alone are compressed. Lossless compression of bfloat16 weights by their exponents is older (Hershcovitch et
al. 2024, ZipNN, arXiv:2411.05239); pages in the pool stay as kernels read them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import zstandard
from blake3 import blake3

from twostroke.kv.tiers.names import KEY_BYTES, Namespace, PageName

LEVEL = 1  # levels 3 and 9 make it larger here, and are slower
MAX_SHARE = 0.95  # of a page; a larger form is not worth the work of reading it
VERSION = 1  # of headers and seals. Another version has other scopes, so it never looks at these pages
SEAL_BYTES = 32
# Magic, version, number of the page in its prompt, bytes of the payload, bytes of the tokens, namespace, key, parent.
_HEADER = struct.Struct(f"<8sIIQI16s{KEY_BYTES}s{KEY_BYTES}s")
_MAGIC = b"2SKVPAGE"
HEADER_BYTES = _HEADER.size


def compress(page: memoryview) -> bytes | None:
    """The form of a page's bytes: signs and fractions, then compressed exponents. None if it is hardly smaller."""
    if len(page) % 2:
        return None
    words = np.frombuffer(page, np.uint16)
    exponents = (words >> 7).astype(np.uint8)
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(exponents.data)
    if len(words) + len(packed) > MAX_SHARE * len(page):
        return None
    fractions = (words & 0x7F | (words >> 8) & 0x80).astype(np.uint8)
    return fractions.tobytes() + packed


def decompress(form: memoryview, into: memoryview) -> bool:
    """Put a page's bytes where they belong. False if this is no form of a page of that size."""
    count = len(into) // 2
    try:
        exponents = zstandard.ZstdDecompressor().decompress(form[count:], max_output_size=count)
    except zstandard.ZstdError:
        return False
    if len(exponents) != count or len(into) % 2:
        return False
    words, fractions = np.frombuffer(into, np.uint16), np.frombuffer(form[:count], np.uint8)
    np.left_shift(np.frombuffer(exponents, np.uint8), 7, out=words, dtype=np.uint16)
    words |= fractions & 0x7F
    words |= (fractions & np.uint16(0x80)) << 8
    return True


@dataclass(frozen=True)
class PageFormat:
    """Headers and seals of one namespace, for one user."""

    namespace: Namespace
    user_key: bytes
    scope: str  # stands for the namespace under the user's key, so two users of one store never meet
    # formats under the user's other keys: pages are found under them, and none is written
    others: "tuple[Self, ...]" = ()
    compressed: bool = False  # whether pages are written compressed; they are read in either form

    @classmethod
    def of(cls, namespace: Namespace, user_keys: Sequence[bytes], compressed: bool = False) -> Self:
        """`user_keys`: the one that seals first."""
        own, *more = user_keys
        others = tuple(cls.of(namespace, [key]) for key in more)
        return cls(namespace, own, scope(namespace.digest, own), others, compressed)

    def payload(self, page: memoryview) -> memoryview:
        form = compress(page) if self.compressed else None
        return page if form is None else memoryview(form)

    def header(self, name: PageName, size: int) -> bytes:
        """All that is known of a page before it is read. `size`: bytes of its payload."""
        digest = self.namespace.digest
        parts = (_MAGIC, VERSION, name.number, size, len(name.tokens), digest, name.key, name.parent)
        return _HEADER.pack(*parts) + name.tokens

    def seal(self, header: bytes, payload: memoryview) -> bytes:
        """The digest of a page, SEAL_BYTES long."""
        return seal(header, payload, self.user_key)

    def room(self, size: int, into: memoryview) -> memoryview | None:
        """Where a payload of `size` bytes is read before `unpack`; None: no page has such a size."""
        if size == len(into):
            return into
        return memoryview(bytearray(size)) if len(into) // 2 < size < len(into) else None

    def unpack(self, payload: memoryview, into: memoryview) -> bool:
        """Make a page of a payload whose seal was right. False: it is none."""
        return payload is into or decompress(payload, into)

    @property
    def about(self) -> dict[str, object]:
        """For people: which model these pages are of."""
        one = self.namespace
        return {"model": one.model, "namespace": one.digest.hex(), "tokens": one.page_size, "bytes": one.page_bytes}


@dataclass(frozen=True)
class PageHeader:
    """A header that was read."""

    number: int
    payload_bytes: int
    tokens_bytes: int
    namespace: bytes
    key: bytes
    parent: bytes

    def name(self, data: bytes | memoryview) -> PageName:
        """The page's name; `data` begins with the header and its tokens."""
        return PageName(
            self.key, self.parent, self.number, bytes(data[HEADER_BYTES : HEADER_BYTES + self.tokens_bytes])
        )


def read_header(data: bytes) -> PageHeader | None:
    """The header that data begins with; None if there is none, or one of another version."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, *parts = _HEADER.unpack_from(data)
    return PageHeader(*parts) if (magic, version) == (_MAGIC, VERSION) else None


def seal(header: bytes | memoryview, payload: bytes | memoryview, user_key: bytes) -> bytes:
    hasher = blake3(header, key=user_key)
    hasher.update(payload)
    return hasher.digest()


def scope(namespace_digest: bytes, user_key: bytes) -> str:
    label = b"scope" if VERSION == 1 else b"scope %d " % VERSION
    return blake3(label + namespace_digest, key=user_key).hexdigest(length=16)
