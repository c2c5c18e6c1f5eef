"""How a page lies in the server: one key with one value, which says whose page it is and proves it.

    key    twostroke:1:<scope>:page:<key of the page>        or :private: for a page that belongs to one value
    value  header, tokens, payload, seal (32)

`twostroke:1:<scope>:about` names the model, for people.
"""

import json

from twostroke.kv.tiers.names import PageName
from twostroke.kv.tiers.page_format import HEADER_BYTES, SEAL_BYTES, VERSION, PageFormat, read_header, scope, seal

PREFIX = f"twostroke:{VERSION}:"
PAGE, PRIVATE, ABOUT = "page", "private", "about"


class RemotePageFormat(PageFormat):
    """Keys and values of one namespace, for one user."""

    def key(self, name: PageName, kind: str = PAGE) -> bytes:
        return f"{PREFIX}{self.scope}:{kind}:{name.key.hex()}".encode()

    def keys(self, name: PageName) -> list[bytes]:
        """The keys under which a page of a prompt may be, the one that is written first."""
        return [self.key(name), *(one.key(name) for one in self.others)]

    @property
    def about_key(self) -> bytes:
        return f"{PREFIX}{self.scope}:{ABOUT}".encode()

    @property
    def about_value(self) -> bytes:
        return json.dumps(self.about).encode()

    def value(self, name: PageName, page: memoryview) -> bytes:
        payload = self.payload(page)
        header = self.header(name, len(payload))
        return b"".join((header, payload, self.seal(header, payload)))


def right(key: bytes, value: bytes, user_key: bytes) -> bool:
    """Whether a value is what this user has written under this key."""
    header = read_header(value)
    if header is None or len(value) != HEADER_BYTES + header.tokens_bytes + header.payload_bytes + SEAL_BYTES:
        return False
    if seal(memoryview(value)[:-SEAL_BYTES], b"", user_key) != value[-SEAL_BYTES:]:
        return False
    kind = key.split(b":")[-2].decode(errors="replace")
    expected = f"{PREFIX}{scope(header.namespace, user_key)}:{kind}:{header.key.hex()}".encode()
    return key == expected and kind in (PAGE, PRIVATE) and (kind == PRIVATE or header.name(value).right)
