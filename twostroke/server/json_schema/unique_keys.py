"""Keys of a JSON object that differ.

A context-free grammar cannot say that the keys of an open object differ. So the text is followed here, and tokens that
would end a key which the object already has are not allowed. A key has one spelling only (see `library.LAYOUT`).
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

_QUOTE, _BACKSLASH = b'"\\'


class KeyTokens:
    """The tokens of a vocabulary that may end a key."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.bytes = tokens
        # By what precedes the quote that ends a string, which depends on whether the token begins after a backslash.
        self.ending: dict[bool, dict[bytes, np.ndarray]] = {}
        quoted = [id for id, token in enumerate(tokens) if _QUOTE in token]
        for escaped in (False, True):
            found: defaultdict[bytes, list[int]] = defaultdict(list)
            for id in quoted:
                if (end := _end_of_string(tokens[id], escaped)) is not None:
                    found[tokens[id][:end]].append(id)
            self.ending[escaped] = {text: np.array(ids) for text, ids in found.items()}
        # These may hold a whole key.
        self.several = np.array([id for id in quoted if tokens[id].count(b'"') > 1], np.int64)


def _end_of_string(token: bytes, escaped: bool) -> int | None:
    for place, byte in enumerate(token):
        if escaped:
            escaped = False
        elif byte == _QUOTE:
            return place
        else:
            escaped = byte == _BACKSLASH
    return None


class UniqueKeys:
    """Follows the JSON in a text that is known to be valid so far."""

    def __init__(self, tokens: KeyTokens, after: bytes = b"") -> None:
        """`after`: what each JSON value in the text follows; empty for a text that is one JSON value."""
        self._tokens, self._after = tokens, after
        self._before = b""  # the end of the text outside of JSON
        self._inside = not after
        self._open: list[set[bytes] | None] = []  # keys of each open object, None for an array
        self._key: bytearray | None = None  # what is read of a key
        self._string = self._escaped = self._key_follows = False

    def forbid(self, mask: np.ndarray) -> np.ndarray:
        """A mask (bool [n]) without the tokens that would repeat a key; as it is where nothing else is left."""
        before, mask = mask, mask.copy()
        if self._key is not None and (used := self._open[-1]):
            read, ending = bytes(self._key), self._tokens.ending[self._escaped]
            for key in used:
                if key.startswith(read) and (ids := ending.get(key[len(read) :])) is not None:
                    mask[ids[ids < len(mask)]] = False
        several = self._tokens.several
        several = several[several < len(mask)]
        for id in several[mask[several]]:
            if not self._copy().push(self._tokens.bytes[id]):
                mask[id] = False
        return mask if mask.any() else before

    def advance(self, token: int) -> None:
        """Read a token."""
        self.push(self._tokens.bytes[token] if token < len(self._tokens.bytes) else b"")

    def push(self, text: bytes) -> bool:
        """Read more of the text. Gives back whether all keys differ."""
        differ = True
        for byte in text:
            differ &= self._read(byte)
        return differ

    def _read(self, byte: int) -> bool:
        if not self._inside:
            self._before = (self._before + bytes([byte]))[-len(self._after) :]
            self._inside = self._before == self._after
            return True
        if self._string:
            return self._read_string(byte)
        match byte:
            case 0x22:  # "
                self._string = True
                self._key = bytearray() if self._key_follows else None
                self._key_follows = False
            case 0x7B:  # {
                self._open.append(set())
                self._key_follows = True
            case 0x5B:  # [
                self._open.append(None)
                self._key_follows = False
            case 0x7D | 0x5D:  # } ]
                self._key_follows = False
                if self._open:
                    self._open.pop()
                if not self._open and self._after:
                    self._inside, self._before = False, b""
            case 0x2C:  # ,
                self._key_follows = bool(self._open) and self._open[-1] is not None
            case _:
                pass
        return True

    def _read_string(self, byte: int) -> bool:
        if self._escaped or byte != _QUOTE:
            self._escaped = not self._escaped and byte == _BACKSLASH
            if self._key is not None:
                self._key.append(byte)
            return True
        self._string = False
        key, keys = self._key, self._open[-1] if self._open else None
        self._key = None
        if key is None or keys is None:
            return True
        differs = bytes(key) not in keys
        keys.add(bytes(key))
        return differs

    def _copy(self) -> "UniqueKeys":
        copy = UniqueKeys(self._tokens, self._after)
        copy.__dict__ |= self.__dict__
        copy._open = [None if keys is None else set(keys) for keys in self._open]
        copy._key = None if self._key is None else bytearray(self._key)
        return copy
