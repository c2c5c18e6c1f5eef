"""What enters and leaves a prefix index, for Dynamo's KV-aware router.

A block is a page. The router knows it by a hash that is chained, so that it stands for all tokens up to its end. Pages
in the host count as those in the pool: they come back within a step. Those on disk are told as such (`disk_events.py`).
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from twostroke.kv.prefix_index import PrefixIndex

POOL, DISK = "GPU", "DISK"  # where blocks are, in Dynamo's words: "GPU" is what an engine computes from


class KVEventPublisher(Protocol):
    """Takes events in their order, from any thread. Its methods queue an event and return."""

    def stored(self, tier: str, tokens: Sequence[int], hashes: Sequence[bytes], parent: bytes | None) -> None:
        """Consecutive blocks of one prompt are in a tier now, all of the same number of tokens.

        `parent`: the block before them; None: they begin the prompt.
        """
        ...

    def removed(self, tier: str, hashes: Sequence[bytes]) -> None: ...


class IndexEvents:
    """Follows an index from the moment that it is made, and tells a publisher.

    The index calls it under the pool's lock, so events are in the order in which pages came and went.
    """

    def __init__(self, index: PrefixIndex, publisher: KVEventPublisher) -> None:
        self._index, self._publisher, self._size = index, publisher, index.pool.page_size
        self._hashes: dict[int, bytes] = {}  # of each indexed page
        with index.pool.lock:
            index.on_insert.append(self._entering)
            index.on_remove.append(self._leaving)

    def close(self) -> None:
        """Tell nothing any more."""
        with self._index.pool.lock:
            self._index.on_insert.remove(self._entering)
            self._index.on_remove.remove(self._leaving)

    def _entering(self, tokens: np.ndarray, pages: Sequence[int]) -> None:
        """Tell of those pages of a prompt, from its first on, that were not known."""
        first = next((i for i, page in enumerate(pages) if page not in self._hashes), len(pages))
        if first == len(pages):
            return
        parent = self._hashes[pages[first - 1]] if first else None
        tokens = tokens[first * self._size : len(pages) * self._size]
        added = list[bytes]()
        for page, start in zip(pages[first:], range(0, len(tokens), self._size), strict=True):
            block = tokens[start : start + self._size].astype("<i4").tobytes()
            added.append(block_hash(added[-1] if added else parent, block))
            self._hashes[page] = added[-1]
        self._publisher.stored(POOL, tokens.tolist(), added, parent)

    def _leaving(self, pages: Sequence[int]) -> None:
        gone = [self._hashes.pop(page) for page in pages if page in self._hashes]
        if gone:
            self._publisher.removed(POOL, gone)


def block_hash(parent: bytes | None, tokens: bytes) -> bytes:
    """The 8 bytes that stand for a block's tokens (int32, little endian) and all before them, in every tier."""
    return hashlib.blake2b((parent or b"") + tokens, digest_size=8).digest()
