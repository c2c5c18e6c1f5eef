"""What an index holds, told to a router: pages by names that depend on all tokens up to their end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from twostroke.kv.prefix_index import PrefixIndex

ROOT = b""  # the name before the first page


def page_names(tokens: np.ndarray, page_size: int, before: bytes = ROOT) -> Iterator[bytes]:
    """The name of each whole page: a digest of its tokens and of the name of the page before."""
    data, size = np.ascontiguousarray(tokens, np.int32).tobytes(), 4 * page_size
    for start in range(0, len(data) - size + 1, size):
        before = hashlib.blake2b(before + data[start : start + size], digest_size=12).digest()
        yield before


class KvEventLog:
    """Watches an index. What it tells is what vLLM and Dynamo call KV events: stored, removed."""

    def __init__(self, index: PrefixIndex) -> None:
        self._names: dict[int, bytes] = {}  # of indexed pages
        self._changes: list[tuple[bool, bytes]] = []
        self._size = index.pool.page_size
        index.on_insert.append(self._entered)
        index.on_remove.append(self._left)

    def take(self) -> list[tuple[bool, bytes]]:
        """What has changed since it was asked last: (whether the index has the page now, its name), in order."""
        changes, self._changes = self._changes, []
        return changes

    def _entered(self, tokens: np.ndarray, pages: Sequence[int]) -> None:
        if not pages or pages[-1] in self._names:
            return
        known = next(i for i, page in enumerate(pages) if page not in self._names)
        before = self._names[pages[known - 1]] if known else ROOT
        new = tokens[known * self._size : len(pages) * self._size]
        for page, name in zip(pages[known:], page_names(new, self._size, before), strict=True):
            self._names[page] = name
            self._changes.append((True, name))

    def _left(self, pages: Sequence[int]) -> None:
        self._changes += [(False, self._names.pop(page)) for page in pages if page in self._names]
