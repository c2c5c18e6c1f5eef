"""Prefix reuse: the base class of all indexes of canonical pages.

An index holds one reference to each whole page it knows, in any tier, for one model. Only canonical entries are
indexed (`kv.provenance`), so a hit has the bits that the model would have computed. There are two kinds: a radix tree
(`kv.radix`, after SGLang's RadixAttention, Zheng et al. 2024) and chained block hashes (`kv.hashed`, after vLLM's
automatic prefix caching).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from twostroke.backends.interface import PAGE, START, STOP
from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch


class PrefixIndex(ABC):
    """Finds the longest known prefix of a prompt, page by page.

    Any thread may call it: the pool's lock guards it.

    Attributes:
        queried_tokens, hit_tokens: totals over all matches, for hit rates per token.
    """

    def __init__(self, pool: PagePool, model: str) -> None:
        self.pool, self.model = pool, model
        self.queried_tokens = self.hit_tokens = 0
        self._clock = 0
        self._indexed: set[int] = set()

    def match(self, tokens: Sequence[int] | np.ndarray) -> KVCache:
        """The longest indexed prefix of `tokens`, in whole pages, as a value."""
        with self.pool.lock:
            self._clock += 1
            array, size = np.array(tokens, np.int32), self.pool.page_size
            pages = self._find(self._keys(array))
            self.queried_tokens += len(array)
            self.hit_tokens += len(pages) * size
            table = np.zeros((len(pages), 4), np.int32)
            if pages:
                first = np.arange(len(pages)) * size
                table[:] = np.stack([np.array(pages), np.zeros_like(first), np.full_like(first, size), first], axis=1)
            count = len(pages) * size
            stretches = (Stretch(count, self.model, NOTHING),) if count else ()
            return KVCache(self.pool, table, array[:count], stretches, count)

    def insert(self, kv: KVCache) -> None:
        """Index the whole pages of the value's canonical prefix. Pages that are already known are kept."""
        if kv.pool is not self.pool:
            raise KVError("a prefix index takes only values in its pool: use copy_to")
        size = self.pool.page_size
        count = kv.canonical_length(self.model) // size
        # A value joined from pieces may be canonical but have partly filled pages: stop at the first of them.
        table = kv.table[:count]
        whole = table[:, STOP] - table[:, START] == size
        count = int(np.argmin(whole)) if not whole.all() else len(table)
        if count:
            keys = self._keys(kv.token_array[: count * size])
            with self.pool.lock:
                self._clock += 1
                self._add(keys, table[:count, PAGE].tolist())

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only the index holds, least recently used and deepest first.

        Returns the number of frames freed. If pages in use block an unused prefix (a slice may hold only the end of a
        prompt), pages in use leave the index too, but no more than necessary.
        """
        with self.pool.lock:
            freed = self._evict(count, in_use=False)
            unused = sum(self.pool.frees(page) for page in self._indexed) if freed < count else 0
            return freed + self._evict(min(count - freed, unused), in_use=True)

    def clear(self) -> None:
        """Drop all pages from the index."""
        with self.pool.lock:
            self._evict(self.num_pages + 1, in_use=True)

    @property
    def num_pages(self) -> int:
        """Number of indexed pages."""
        return len(self._indexed)

    @abstractmethod
    def _find(self, keys: list[bytes]) -> list[int]: ...

    @abstractmethod
    def _add(self, keys: list[bytes], pages: list[int]) -> None: ...

    @abstractmethod
    def _evict(self, count: int, in_use: bool) -> int:
        """Drop leaves until `count` pages are free. Pages in use are dropped (freeing nothing) only if `in_use`."""

    def _keys(self, tokens: np.ndarray) -> list[bytes]:
        size = self.pool.page_size
        return [tokens[i : i + size].tobytes() for i in range(0, len(tokens) - size + 1, size)]

    def _hold(self, pages: list[int]) -> None:
        self.pool.retain(np.array(pages, np.int64))
        self._indexed.update(pages)

    def _drop(self, page: int) -> bool:
        """Drop a page from the index. Returns whether this freed a frame of the pool."""
        self._indexed.remove(page)
        return bool(self.pool.release(np.array([page])))
