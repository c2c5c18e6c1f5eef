"""Prefix reuse: an index of canonical pages.

It holds one reference to each whole page it knows, in the pool or in the host, for one model. Only canonical entries
are indexed (`kv.provenance`), so a hit has the bits that the model would have computed.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable, StateSnapshot
from twostroke.kv.evictable_pages import EvictablePages
from twostroke.kv.pages import NOWHERE, POOL
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.kv.spans import NO_PAGE


class PrefixIndex(EvictablePages):
    """Finds the longest known prefix of a prompt, page by page.

    Any thread may call it: the pool's lock guards it.

    Attributes:
        queried_tokens, hit_tokens: totals over all matches, for hit rates per token.
        unusable_tokens: total of tokens that matches found and that no hit has: pages of a windowed group, or a
            snapshot of states, are missing behind them.
        on_insert: called under the pool's lock with tokens [n] and the first page of each of their blocks, from a
            prompt's first on, of which some may be new to the index.
        on_enter: the same with the salt, for those who are told of pages with a salt as well.
    """

    def __init__(self, pool: PagePool, model: str) -> None:
        super().__init__(pool)
        self.model, self.queried_tokens, self.hit_tokens, self.unusable_tokens = model, 0, 0, 0
        self.on_insert: list[Callable[[np.ndarray, Sequence[int]], None]] = []
        self.on_enter: list[Callable[[np.ndarray, Sequence[int], bytes], None]] = []

    def match(self, tokens: Sequence[int] | np.ndarray, salt: bytes = b"") -> KVCache:
        """The longest indexed prefix of `tokens`, in whole pages, as a value.

        Only pages that were indexed with the same salt are found, so those with different salts share nothing.
        """
        array, size = np.array(tokens, np.int32), self.pool.page_size
        keys = self._keys(array, salt)
        with self.pool.lock:
            blocks = self.blocks.usable(found := self._tree.find(keys))
            self._touch(blocks)
            self.queried_tokens += len(array)
            self.hit_tokens += len(blocks) * size
            self.unusable_tokens += (len(found) - len(blocks)) * size
            if self.host.max_bytes:
                hosted = sum(self.pool.frame(page) == NOWHERE for page in blocks)
                self.host.traffic.looked_up(hosted, len(keys) - len(blocks))
            return self._value(array[: len(blocks) * size], blocks)

    def extend_match(self, kv: KVCache, tokens: np.ndarray) -> KVCache:
        """The longest indexed prefix of `tokens` if it is longer than `kv`, else `kv`. Not counted as a match."""
        keys, size = self._keys(tokens), self.pool.page_size
        with self.pool.lock:
            blocks = self.blocks.usable(self._tree.find(keys))
            if len(blocks) * size <= len(kv):
                return kv
            self._touch(blocks)
            return self._value(tokens[: len(blocks) * size], blocks)

    def parting(self, tokens: np.ndarray, salt: bytes = b"") -> int:
        """After how many tokens the prompt parts from all others: the last boundary in what any of them shares with it.

        A hit may end earlier, if no snapshot is there yet.
        """
        keys, step = self._keys(tokens, salt), math.lcm(self.pool.page_size, self.pool.geometry.chunk)
        with self.pool.lock:
            return len(self._tree.find(keys)) * self.pool.page_size // step * step

    def _value(self, tokens: np.ndarray, blocks: list[int]) -> KVCache:
        state = self.blocks.snapshot(blocks[-1]) if blocks and self.pool.geometry.states else []
        return value_of_pages(self.pool, self.model, tokens, self.blocks.of_hit(blocks), state)

    def insert(self, kv: KVCache, salt: bytes = b"") -> list[int]:
        """Index the whole pages of the value's canonical prefix, and return its blocks, by their first pages.

        Pages that are already known are kept. Pages with a salt stay here: `on_insert` is not called for them, so
        neither stores nor routers learn of them.
        """
        if kv.pool is not self.pool or kv.tier != POOL:
            raise KVError("a prefix index takes only values in its pool: use copy_to")
        size = self.pool.page_size
        count = kv.canonical_length(self.model) // size
        # A value joined from pieces may be canonical but have partly filled pages: stop at the first of them.
        table = kv.table[:count]
        cut = np.flatnonzero(table[:, STOP] - table[:, START] != size)
        count = int(cut[0]) if len(cut) else len(table)
        keys, pages = self._keys(kv.token_array[: count * size], salt), table[:count, PAGE:]
        with self.pool.lock:
            if self.pool.num_groups > 1 or self.pool.geometry.windowed:
                states = {one.at // size: one.pages.tolist() for one in kv.entry_table.snapshots if one.at % size == 0}
                blocks = self._add_grouped(keys, pages, states)
            else:
                blocks = self._add(keys, pages[:, 0].tolist())
            self._touch(blocks)
            for enter in () if salt else self.on_insert:
                enter(kv.token_array, blocks)
            for know in self.on_enter:
                know(kv.token_array, blocks, salt)
            return blocks

    def _add_grouped(self, keys: list[bytes], pages: np.ndarray, states: dict[int, list[int]]) -> list[int]:
        """`_add` blocks with their pages of all groups, [n, groups], some of which windowed groups have given back.

        `states`: the pages of snapshots, by the number of blocks before each.
        """
        known = len(self._tree.find(keys))
        gone = np.flatnonzero(pages[known:, 0] == NO_PAGE)
        count = known + int(gone[0]) if len(gone) else len(keys)
        blocks = self._add(keys[:count], pages[:count, 0].tolist())
        for i, block in enumerate(blocks):
            firsts, came = self.blocks.add(block, pages[i], states.get(i + 1, []), new=i >= known)
            self.pool.retain(np.array(came, np.int64))
            self._in_pool.update(dict.fromkeys(firsts))
        return blocks

    def _add(self, keys: list[bytes], pages: list[int]) -> list[int]:
        """Know pages by their keys, and hold those that are new. Returns the pages along `keys`."""
        known, new = self._tree.add(keys, pages)
        self._retain(new)
        return known

    def _keys(self, tokens: np.ndarray, salt: bytes = b"") -> list[bytes]:
        """The key of each whole page of `tokens`; the first has the salt, on which all others depend. No lock."""
        data, size = tokens.tobytes(), tokens.itemsize * self.pool.page_size
        keys = [data[i : i + size] for i in range(0, len(data) - size + 1, size)]
        if salt and keys:
            keys[0] += hashlib.blake2b(salt, digest_size=16).digest()
        return keys


def value_of_pages(
    pool: PagePool, model: str, tokens: np.ndarray, pages: np.ndarray, state: Sequence[int] = ()
) -> KVCache:
    """The value of a prompt's canonical pages, [n / page_size, groups], with [n] int32 tokens from position 0.

    `state`: the pages of a snapshot at its end. It takes references of its own.
    """
    size = pool.page_size
    table = spans.empty(pool.num_groups, len(tokens) // size)
    table[:, PAGE:], table[:, STOP], table[:, POSITION] = pages, size, np.arange(len(table)) * size
    stretches = (Stretch(len(tokens), model, NOTHING),) if len(tokens) else ()
    snapshots = EntryTable.empty(pool.num_groups, bool(pool.geometry.states)).snapshots
    if state:
        snapshots = (StateSnapshot(len(tokens), np.array(state, np.int32)),)
    return KVCache(pool, EntryTable(table, tokens, stretches, len(tokens), None, snapshots))
