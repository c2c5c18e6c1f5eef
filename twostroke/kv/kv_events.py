"""What an index holds, told to a router: pages by names that depend on all tokens up to their end."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from twostroke.kv.prefix_index import PrefixIndex

ROOT = b""  # the name before the first page
Change = tuple[bool, bytes]  # whether an index has a page from now on, and its name


def root_of(salt: bytes) -> bytes:
    """The name before the first page of prompts with a salt, which share no page with others."""
    return _digest(salt) if salt else ROOT


def page_names(tokens: Sequence[int] | np.ndarray, page_size: int, before: bytes = ROOT) -> Iterator[bytes]:
    """The name of each whole page: a digest of its tokens and of the name of the page before."""
    data, size = np.ascontiguousarray(tokens, np.int32).tobytes(), 4 * page_size
    for start in range(0, len(data) - size + 1, size):
        before = _digest(before + data[start : start + size])
        yield before


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()


class KvEventLog:
    """Watches an index. What it tells is what vLLM and Dynamo call KV events: stored, removed."""

    def __init__(self, index: PrefixIndex) -> None:
        self._names: dict[int, bytes] = {}  # of indexed pages
        self._changes: list[Change] = []
        self._pool = index.pool
        index.on_enter.append(self._entered)
        index.on_remove.append(self._left)

    def take(self) -> list[Change]:
        """What has changed since it was asked last, in order. Any thread may call it."""
        with self._pool.lock:
            changes, self._changes = self._changes, []
        return changes

    def _entered(self, tokens: np.ndarray, pages: Sequence[int], salt: bytes) -> None:
        if not pages or pages[-1] in self._names:
            return
        size = self._pool.page_size
        known = next(i for i, page in enumerate(pages) if page not in self._names)
        before = self._names[pages[known - 1]] if known else root_of(salt)
        new = tokens[known * size : len(pages) * size]
        for page, name in zip(pages[known:], page_names(new, size, before), strict=True):
            self._names[page] = name
            self._changes.append((True, name))

    def _left(self, pages: Sequence[int]) -> None:
        self._changes += [(False, self._names.pop(page)) for page in pages if page in self._names]
