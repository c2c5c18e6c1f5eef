"""What enters and leaves a prefix index, for Dynamo's KV-aware router.

A block is a page. The router knows it by a hash that is chained, so that it stands for all tokens up to its end. Pages
in the pool and in the host count as stored. Those of the disk and of the remote store do not: every worker that shares
the store finds them.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from twostroke.kv.prefix import PrefixIndex


class Publisher(Protocol):
    """Dynamo's `KvEventPublisher`. Its methods queue an event and return."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


class Events:
    """Follows an index from the moment that it is made, and tells a publisher.

    The index calls it under the pool's lock, so events are in the order in which pages came and went.
    """

    def __init__(self, index: PrefixIndex, publisher: Publisher) -> None:
        self._index, self._publisher, self._size = index, publisher, index.pool.page_size
        self._hashes: dict[int, bytes] = {}  # of each indexed page
        with index.pool.lock:
            index.entering.append(self._entering)
            index.leaving.append(self._leaving)

    def close(self) -> None:
        """Tell nothing any more."""
        with self._index.pool.lock:
            self._index.entering.remove(self._entering)
            self._index.leaving.remove(self._leaving)

    def _entering(self, tokens: np.ndarray, pages: Sequence[int]) -> None:
        """Tell of those pages of a prompt, from its first on, that were not known."""
        first = next((i for i, page in enumerate(pages) if page not in self._hashes), len(pages))
        if first == len(pages):
            return
        parent = self._hashes[pages[first - 1]] if first else None
        tokens = tokens[first * self._size : len(pages) * self._size]
        added = list[bytes]()
        for page, start in zip(pages[first:], range(0, len(tokens), self._size), strict=True):
            block = tokens[start : start + self._size].tobytes()
            before = added[-1] if added else parent or b""
            added.append(hashlib.blake2b(before + block, digest_size=8).digest())
            self._hashes[page] = added[-1]
        self._publisher.publish_stored(
            tokens.tolist(),
            [self._size] * len(added),
            [_signed(digest) for digest in added],
            None if parent is None else _signed(parent),
        )

    def _leaving(self, pages: Sequence[int]) -> None:
        gone = [self._hashes.pop(page) for page in pages if page in self._hashes]
        if gone:
            self._publisher.publish_removed([_signed(digest) for digest in gone])


def _signed(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)
