"""How a page lies in the server: one key with one value, which says whose page it is and proves it.

    key    twostroke:1:<scope>:page:<key of the page>        or :private: for a page that belongs to one value
    value  header, tokens, payload (page_bytes), digest (32)

The scope stands for the namespace under the user's key, so two users of one server never meet. The digest is a keyed
BLAKE3 of all before it: a checksum, and a seal that only who has the user's key can make. `twostroke:1:<scope>:about`
names the model, for people.
"""

import json
import struct
from dataclasses import dataclass

from blake3 import blake3

from twostroke.tiers.names import KEY_BYTES, Namespace, PageName

VERSION = 1
PREFIX = f"twostroke:{VERSION}:"
DIGEST_BYTES = 32
PAGE, PRIVATE, ABOUT = "page", "private", "about"

# Magic, version, number of the page in its prompt, bytes of the payload, bytes of the tokens, namespace, key, parent.
_HEADER = struct.Struct(f"<8sIIQI16s{KEY_BYTES}s{KEY_BYTES}s")
_MAGIC = b"2SKVPAGE"


@dataclass(frozen=True)
class Form:
    """Keys and values of one namespace, for one user.

    Attributes:
        scope: stands for the namespace in keys.
    """

    namespace: Namespace
    user_key: bytes
    scope: str

    @classmethod
    def of(cls, namespace: Namespace, user_key: bytes) -> "Form":
        return cls(namespace, user_key, scope(namespace.digest, user_key))

    def key(self, name: PageName, kind: str = PAGE) -> bytes:
        return f"{PREFIX}{self.scope}:{kind}:{name.key.hex()}".encode()

    @property
    def about_key(self) -> bytes:
        return f"{PREFIX}{self.scope}:{ABOUT}".encode()

    @property
    def about(self) -> bytes:
        """JSON for people: which model these pages are of."""
        one = self.namespace
        facts = {"model": one.model, "namespace": one.digest.hex(), "tokens": one.page_size, "bytes": one.page_bytes}
        return json.dumps(facts).encode()

    def header(self, name: PageName) -> bytes:
        """What a value begins with: all that is known of the page before it is read."""
        size, digest = self.namespace.page_bytes, self.namespace.digest
        parts = (_MAGIC, VERSION, name.number, size, len(name.tokens), digest, name.key, name.parent)
        return _HEADER.pack(*parts) + name.tokens

    def seal(self, header: bytes, payload: memoryview) -> bytes:
        """The digest that a value ends with."""
        hasher = blake3(header, key=self.user_key)
        hasher.update(payload)
        return hasher.digest()

    def value(self, name: PageName, payload: memoryview) -> bytes:
        header = self.header(name)
        return b"".join((header, payload, self.seal(header, payload)))


def scope(namespace_digest: bytes, user_key: bytes) -> str:
    return blake3(b"scope" + namespace_digest, key=user_key).hexdigest(length=16)


def right(key: bytes, value: bytes, user_key: bytes) -> bool:
    """Whether a value is what this user has written under this key."""
    if len(value) < _HEADER.size + DIGEST_BYTES:
        return False
    magic, version, number, size, tokens_bytes, namespace, page_key, parent = _HEADER.unpack_from(value)
    if (magic, version) != (_MAGIC, VERSION) or len(value) != _HEADER.size + tokens_bytes + size + DIGEST_BYTES:
        return False
    if blake3(memoryview(value)[:-DIGEST_BYTES], key=user_key).digest() != value[-DIGEST_BYTES:]:
        return False
    kind = key.split(b":")[-2].decode(errors="replace")
    name = PageName(page_key, parent, number, value[_HEADER.size : _HEADER.size + tokens_bytes])
    expected = f"{PREFIX}{scope(namespace, user_key)}:{kind}:{page_key.hex()}".encode()
    return key == expected and kind in (PAGE, PRIVATE) and (kind == PRIVATE or name.right)
