"""Chained block hashes: a page's key is the digest of its tokens and of the key of the page before it."""

import hashlib
import heapq
from dataclasses import dataclass

from twostroke.kv.pool import PagePool
from twostroke.kv.prefix import PrefixIndex


@dataclass
class Block:
    page: int
    parent: bytes
    last_used: int
    num_children: int = 0


class HashIndex(PrefixIndex):
    """Prefix index as a hash table of chained digests (16 bytes of blake2b: collisions are negligible)."""

    def __init__(self, pool: PagePool, model: str) -> None:
        super().__init__(pool, model)
        self._blocks: dict[bytes, Block] = {}
        self._seed = model.encode()

    def _chain(self, keys: list[bytes]) -> list[bytes]:
        digests, digest = [], self._seed
        for key in keys:
            digest = hashlib.blake2b(digest + key, digest_size=16).digest()
            digests.append(digest)
        return digests

    def _find(self, keys: list[bytes]) -> list[int]:
        pages = []
        for digest in self._chain(keys):
            block = self._blocks.get(digest)
            if block is None:
                break
            block.last_used = self._clock
            pages.append(block.page)
        return pages

    def _add(self, keys: list[bytes], pages: list[int]) -> None:
        parent = self._seed
        for digest, page in zip(self._chain(keys), pages, strict=True):
            block = self._blocks.get(digest)
            if block is None:
                self._hold([page])
                self._blocks[digest] = Block(page, parent, self._clock)
                if parent in self._blocks:
                    self._blocks[parent].num_children += 1
            else:
                block.last_used = self._clock
            parent = digest

    def _evict(self, count: int, in_use: bool) -> int:
        def goes(block: Block) -> bool:
            return block.num_children == 0 and (in_use or self.pool.frees(block.page))

        freed = 0
        leaves = [(block.last_used, digest) for digest, block in self._blocks.items() if goes(block)]
        heapq.heapify(leaves)
        while freed < count and leaves:
            _, digest = heapq.heappop(leaves)
            block = self._blocks.pop(digest)
            freed += self._drop(block.page)
            parent = self._blocks.get(block.parent)
            if parent is not None:
                parent.num_children -= 1
                if goes(parent):
                    heapq.heappush(leaves, (parent.last_used, block.parent))
        return freed
