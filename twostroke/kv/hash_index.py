"""Chained block hashes: a page's key is the digest of its tokens and of the key of the page before it."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex


@dataclass
class HashedPage:
    page: int
    parent: bytes
    children: list[bytes] = field(default_factory=list)


class HashIndex(PrefixIndex):
    """Prefix index as a hash table of chained digests (16 bytes of blake2b: collisions are negligible)."""

    def __init__(self, pool: PagePool, model: str) -> None:
        super().__init__(pool, model)
        self._blocks: dict[bytes, HashedPage] = {}
        self._digests: dict[int, bytes] = {}  # of each page
        self._seed = model.encode()

    def _keys(self, tokens: np.ndarray, salt: bytes = b"") -> list[bytes]:
        digests, digest = list[bytes](), self._seed
        for key in super()._keys(tokens, salt):
            digest = hashlib.blake2b(digest + key, digest_size=16).digest()
            digests.append(digest)
        return digests

    def _find(self, keys: list[bytes]) -> list[int]:
        pages = []
        for digest in keys:
            block = self._blocks.get(digest)
            if block is None:
                break
            pages.append(block.page)
        return pages

    def _add(self, keys: list[bytes], pages: list[int]) -> list[int]:
        parent, known = self._seed, list[int]()
        for digest, page in zip(keys, pages, strict=True):
            block = self._blocks.get(digest)
            if block is None:
                self._retain([page])
                self._blocks[digest] = block = HashedPage(page, parent)
                self._digests[page] = digest
                if parent in self._blocks:
                    self._blocks[parent].children.append(digest)
            known.append(block.page)
            parent = digest
        return known

    def _is_leaf(self, page: int) -> bool:
        return not self._blocks[self._digests[page]].children

    def _remove(self, page: int) -> list[int]:
        gone, stack = list[int](), [self._digests[page]]
        if (parent := self._blocks.get(self._blocks[stack[0]].parent)) is not None:
            parent.children.remove(stack[0])
        while stack:
            block = self._blocks.pop(stack.pop())
            stack += block.children
            gone.append(block.page)
            del self._digests[block.page]
        return gone
