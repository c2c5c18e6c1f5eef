"""Prefix reuse: the base class of all indexes of canonical pages.

An index holds one reference to each whole page it knows, in the pool or in the host, for one model. Only canonical
entries are indexed (`kv.provenance`), so a hit has the bits that the model would have computed. There are two kinds: a
radix tree (`kv.radix`, after SGLang's RadixAttention, Zheng et al. 2024) and chained block hashes (`kv.hashed`, after
vLLM's automatic prefix caching).

A *block* is the tokens of a page, with the pages that hold their entries in all groups of layers. The index knows a
block by its page of the first group. Pages of groups of one window come and go together. Of windowed groups, whose
entries only the tokens right behind them need, a block may have no pages any more: a hit ends where they are there.
Only the last ones of a hit count as used, so those in the middle of prompts leave first, and those where prompts part
stay. Snapshots of states are like them: a hit ends behind a block that has one. Rows between snapshots are not indexed.

Pages are kept in the order of their last use, the deepest of a prompt first. A use of a page is a use of all pages
before it, so no page comes after one that is deeper. When frames are needed, the first pages that only the index holds
are spilled to the host, where they stay indexed, as far as its budget goes; pages of the host that were not used for
the longest time make room. Without room there, they leave the index.
"""

import hashlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.errors import KVError, OutOfPages
from twostroke.kv import spans
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable, StateSnapshot
from twostroke.kv.pages import NOWHERE, POOL
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.tier_moves import spill
from twostroke.kv.tiers.counters import TierCounters

SCAN_PAGES = 512  # pages that are looked at together for those that could leave


class HostBudget:
    """Bytes of ordinary memory that prefix indexes may take, all together."""

    def __init__(self, max_bytes: int = 0, traffic: TierCounters | None = None) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self.traffic = traffic or TierCounters()
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Take bytes, or return False if they are not left. A negative size gives bytes back."""
        with self._lock:
            if size > 0 and self.used_bytes + size > self.max_bytes:
                return False
            self.used_bytes += size
            return True


class PrefixIndex(ABC):
    """Finds the longest known prefix of a prompt, page by page.

    Any thread may call it: the pool's lock guards it.

    Attributes:
        queried_tokens, hit_tokens: totals over all matches, for hit rates per token.
        unusable_tokens: total of tokens that matches found and that no hit has: pages of a windowed group, or a
            snapshot of states, are missing behind them.
        evicted_pages, evicted_snapshots: totals of frames that `evict` has freed, and of snapshots that it let go.
        host: budget of the host; 0 bytes unless it is set.
        on_insert: called under the pool's lock with tokens [n] and the first page of each of their blocks, from a
            prompt's first on, of which some may be new to the index.
        on_remove: called under the pool's lock with pages of any group that leave the index, before they are released.
    """

    def __init__(self, pool: PagePool, model: str) -> None:
        self.pool, self.model = pool, model
        self.queried_tokens = self.hit_tokens = self.unusable_tokens = self.evicted_pages = self.evicted_snapshots = 0
        self.host = HostBudget()
        self.on_insert: list[Callable[[np.ndarray, Sequence[int]], None]] = []
        self.on_remove: list[Callable[[Sequence[int]], None]] = []
        groups = pool.geometry.kv_groups
        windows = {group.window: group.blocks_in_window(pool.page_size) for _, group in groups}
        self._kinds = [[g for g, group in groups if group.window == window] for window in windows]
        self._seen = list(windows.values())
        if pool.geometry.states:
            self._kinds.append([])
            self._seen.append(1)
        # Several groups: all pages of one kind of group of a block, by the first of them; the first windowed pages of
        # each block, by kind; and the block of windowed pages.
        self._sets: dict[int, list[int]] = {}
        self._windowed: dict[int, list[int]] = {}
        self._block_of: dict[int, int] = {}
        # Each kind of a block's pages is in one of these by its first page.
        self._in_pool: dict[int, None] = {}  # indexed pages by last use, the least recent and deepest first
        self._in_host: dict[int, None] = {}  # those that were spilled and may be in the host, in the same order

    def match(self, tokens: Sequence[int] | np.ndarray, salt: bytes = b"") -> KVCache:
        """The longest indexed prefix of `tokens`, in whole pages, as a value.

        Only pages that were indexed with the same salt are found, so those with different salts share nothing.
        """
        array, size = np.array(tokens, np.int32), self.pool.page_size
        keys = self._keys(array, salt)
        with self.pool.lock:
            blocks = self._usable(found := self._find(keys))
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
            blocks = self._usable(self._find(keys))
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
            return len(self._find(keys)) * self.pool.page_size // step * step

    def _value(self, tokens: np.ndarray, blocks: list[int]) -> KVCache:
        state = self.snapshot_pages(blocks[-1]) if blocks and self.pool.geometry.states else []
        return value_of_pages(self.pool, self.model, tokens, self._pages_of(blocks), state)

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
            return blocks

    def _add_grouped(self, keys: list[bytes], pages: np.ndarray, states: dict[int, list[int]]) -> list[int]:
        """`_add` blocks with their pages of all groups, [n, groups], some of which windowed groups have given back.

        `states`: the pages of snapshots, by the number of blocks before each.
        """
        known = len(self._find(keys))
        gone = np.flatnonzero(pages[known:, 0] == NO_PAGE)
        count = known + int(gone[0]) if len(gone) else len(keys)
        pages = pages[:count]
        blocks = self._add(keys[:count], pages[:, 0].tolist())
        for i, block in enumerate(blocks):
            if i >= known and len(self._kinds[0]) > 1:
                self._sets[block] = pages[i, self._kinds[0]].tolist()
                self.pool.retain(pages[i, self._kinds[0][1:]])
            there = self._windowed.setdefault(block, [NO_PAGE] * (len(self._kinds) - 1)) if len(self._kinds) > 1 else []
            for k, first in enumerate(there):
                columns = self._kinds[k + 1]
                own: list[int] = pages[i, columns].tolist() if columns else states.get(i + 1, [])
                if first == NO_PAGE and own and own[0] != NO_PAGE:
                    there[k] = first = own[0]
                    self._sets[first], self._block_of[first] = own, block
                    self.pool.retain(np.array(own, np.int64))
                    self._in_pool[first] = None
        return blocks

    def snapshot_pages(self, block: int) -> list[int]:
        """The pages of the snapshot behind an indexed block; none if there is no snapshot."""
        return self._sets.get(self._windowed[block][-1], [])

    def block_pages(self, block: int) -> list[int]:
        """The pages of all groups of an indexed block; NO_PAGE for what windowed groups have given back."""
        if not self._sets:
            return [block]
        pages = [NO_PAGE] * self.pool.num_groups
        for kind, first in zip(self._kinds, [block, *self._windowed.get(block, [])], strict=True):
            for group, page in zip(kind, self._sets.get(first, [first] * len(kind)) if kind else (), strict=True):
                pages[group] = page
        return pages

    def _usable(self, blocks: list[int]) -> list[int]:
        """As many of a prompt's blocks that the windowed groups have all pages that the next token attends to."""
        if not self._windowed:
            return blocks
        usable = np.ones(len(blocks) + 1, bool)
        for k, seen in enumerate(self._seen[1:]):
            assert seen is not None
            there = np.array([self._windowed[block][k] != NO_PAGE for block in blocks], bool)
            number = np.arange(len(blocks) + 1)
            gaps = np.maximum.accumulate(np.where(there, 0, number[1:])) if blocks else number[1:]
            usable &= np.concatenate([[0], gaps]) <= np.maximum(0, number - seen)  # the last gap before each block
        return blocks[: int(np.flatnonzero(usable)[-1])]

    def _pages_of(self, blocks: list[int]) -> np.ndarray:
        """[n, groups] pages of a hit's blocks, of windowed groups those that the next token attends to."""
        pages = np.array([self.block_pages(block) for block in blocks] if self._sets else blocks, np.int32)
        pages = pages.reshape(len(blocks), self.pool.num_groups)
        for kind, seen in zip(self._kinds, self._seen, strict=True):
            pages[: max(0, len(blocks) - (len(blocks) if seen is None else seen)), kind] = NO_PAGE
        return pages

    def evict(self, count: int) -> int:
        """Free up to `count` frames of pages that only the index holds, least recently used and deepest first.

        Returns the number of frames freed. Pages that the host has room for stay indexed. If pages in use block an
        unused prefix that has to leave (a slice may hold only the end of a prompt), they leave the index too, but no
        more than necessary.
        """
        with self.pool.lock:
            freed = self._spill_to_host(count)
            if freed < count and self._in_host:
                self._mark_returned(self._in_host)
                freed += self._spill_to_host(count - freed)
            freed += self._evict_from_pool(count - freed, in_use=False)
            freed += self._evict_from_pool(count - freed, in_use=True)
            self.evicted_pages += freed
            return freed

    @property
    def num_evictable(self) -> int:
        """Number of frames that `evict` could free."""
        with self.pool.lock:
            return self.pool.num_would_free(np.array(self.pages, np.int64))

    def can_evict(self, count: int) -> bool:
        """Whether `evict` could free so many frames. Looks at pages that would go first, and rarely at all."""
        with self.pool.lock:
            pages, found = chain(self._in_pool, self._in_host), 0
            while found < count and (some := list(islice(pages, SCAN_PAGES))):
                found += self.pool.num_would_free(np.array(self._all_pages(some), np.int64))
            return found >= count

    def clear(self) -> None:
        """Drop all pages from the index."""
        with self.pool.lock:
            for page in [*self._in_host, *self._in_pool]:
                if page in self._in_host or page in self._in_pool:
                    self._remove_and_release(page)

    @property
    def pages(self) -> list[int]:
        """The indexed pages."""
        return self._all_pages([*self._in_pool, *self._in_host])

    @property
    def num_pages(self) -> int:
        """Number of indexed pages, in the pool or in the host."""
        return self.num_in_pool + self._count(self._in_host)

    @property
    def num_in_pool(self) -> int:
        """Number of indexed pages in the pool."""
        return self._count(self._in_pool)

    def pages_in_pool(self) -> np.ndarray:
        """The ids of these pages. The pool's lock must be held."""
        return np.array(self._all_pages(list(self._in_pool)), np.int64)

    def _all_pages(self, firsts: list[int]) -> list[int]:
        """The pages that stand behind each of these first pages of a kind."""
        return [page for first in firsts for page in self._sets.get(first, (first,))] if self._sets else firsts

    def _count(self, firsts: dict[int, None]) -> int:
        return sum(len(self._sets.get(first, (first,))) for first in firsts) if self._sets else len(firsts)

    def _freeable(self, firsts: list[int]) -> list[int]:
        """Those whose pages' release would free a frame for each page."""
        pages = np.array(firsts, np.int64)
        found = pages[self.pool.would_free(pages)].tolist()
        if not self._sets or not found:
            return found
        sets = [self._sets.get(one, (one,)) for one in found]
        starts = np.cumsum([0, *map(len, sets[:-1])])
        free = np.logical_and.reduceat(self.pool.would_free(np.array([*chain.from_iterable(sets)], np.int64)), starts)
        return [one for one, all_free in zip(found, free.tolist(), strict=True) if all_free]

    @abstractmethod
    def _find(self, keys: list[bytes]) -> list[int]:
        """The pages along `keys`, from the first on, as far as they are known."""

    @abstractmethod
    def _add(self, keys: list[bytes], pages: list[int]) -> list[int]:
        """Know pages by their keys; `_hold` those that are new. Returns the pages along `keys`."""

    @abstractmethod
    def _is_leaf(self, page: int) -> bool:
        """Whether no indexed page comes after this one."""

    @abstractmethod
    def _remove(self, page: int) -> list[int]:
        """Forget a page and all after it, and return them."""

    def _keys(self, tokens: np.ndarray, salt: bytes = b"") -> list[bytes]:
        """The key of each whole page of `tokens`; the first has the salt, on which all others depend. No lock."""
        data, size = tokens.tobytes(), tokens.itemsize * self.pool.page_size
        keys = [data[i : i + size] for i in range(0, len(data) - size + 1, size)]
        if salt and keys:
            keys[0] += hashlib.blake2b(salt, digest_size=16).digest()
        return keys

    def _retain(self, pages: list[int]) -> None:
        self.pool.retain(np.array(pages, np.int64))
        self._in_pool.update(dict.fromkeys(pages))

    def _touch(self, pages: list[int]) -> None:
        """Note the use of a prompt's blocks: the deepest is the first of them to go."""
        for i, page in enumerate(reversed(pages)):
            self._use(page)
            for k, first in enumerate(self._windowed.get(page, ()) if self._windowed else ()):
                if first != NO_PAGE and i < (self._seen[k + 1] or 0):
                    self._use(first)

    def _use(self, page: int) -> None:
        order = self._in_pool
        if page in self._in_host:
            self._mark_returned([page])
            order = self._in_host if page in self._in_host else self._in_pool
        del order[page]
        order[page] = None

    def _spill_to_host(self, count: int) -> int:
        """Move unused pages to the host as far as there is room. Returns the number of frames freed."""
        size = self.pool.page_bytes
        if self.host.max_bytes < size or count <= 0:
            return 0
        firsts, reserved = list[int](), 0
        for first in self._freeable(list(self._in_pool))[:count]:
            if reserved >= count or not self._reserve_host(size * self._size(first)):
                break
            firsts.append(first)
            reserved += self._size(first)
        firsts = [first for first in firsts if first in self._in_pool]  # making room may have removed some
        began = time.perf_counter()
        try:
            freed = spill(self.pool, np.array(self._all_pages(firsts), np.int64)) if firsts else 0
        except OutOfPages:  # there is no memory left for it
            freed = 0
        moved = [first for first in firsts if self._away(first)]
        pages = sum(map(self._size, moved))
        self.host.take(-size * (reserved - pages))
        for first in moved:
            del self._in_pool[first]
            self._in_host[first] = None
        self.host.traffic.moved("out", pages, pages * size, time.perf_counter() - began)
        return max(freed, pages)

    def _size(self, first: int) -> int:
        return len(self._sets.get(first, (first,)))

    def _away(self, first: int) -> bool:
        """Whether one of these pages has no frame."""
        return any(self.pool.frame(page) == NOWHERE for page in self._sets.get(first, (first,)))

    def _reserve_host(self, size: int) -> bool:
        """Take room for a page in the host, if necessary that of the least recently used pages there."""
        while not (taken := self.host.take(size)) and self._in_host:
            first = next(filter(self._goes_alone, self._in_host), next(iter(self._in_host)))
            if self._away(first):
                self._remove_and_release(first)
            else:
                self._mark_returned([first])
        return taken

    def _mark_returned(self, pages: Iterable[int]) -> None:
        """Note those of these pages of the host that strokes have brought back."""
        for page in [page for page in pages if not self._away(page)]:
            del self._in_host[page]
            self._in_pool[page] = None
            size = self._size(page)
            self.host.take(-size * self.pool.page_bytes)
            self.host.traffic.moved("in", size, size * self.pool.page_bytes, 0.0)

    def _evict_from_pool(self, count: int, in_use: bool) -> int:
        """Remove unused pages of the pool, with all after them. Returns the number of frames freed.

        Pages that others follow go only if `in_use`, since those are used.
        """
        gone: list[int] = []  # released together, since that takes as long for one as for many
        freed, looked = 0, SCAN_PAGES
        while freed < count:
            some = list(islice(self._in_pool, looked))
            for page in self._freeable(some):
                if freed >= count:
                    break
                if page in self._in_pool and (in_use or self._goes_alone(page)):
                    pages = self._detach(page)
                    freed += 1 if len(pages) == 1 else self.pool.num_would_free(np.array(pages, np.int64))
                    gone += pages
            if len(some) < looked:
                break
            looked *= 4  # rarely: the first are those that were not used for the longest time
        left = np.array(gone, np.int64)
        if self.pool.snapshot_pages:
            states = np.count_nonzero(self.pool.group_of[left] == self.pool.num_groups)
            self.evicted_snapshots += int(states) // self.pool.snapshot_pages
        self.pool.release(left)
        return freed

    def _remove_and_release(self, page: int) -> int:
        """Remove a page and all after it. Returns the number of frames freed."""
        return self.pool.release(np.array(self._detach(page), np.int64))

    def _goes_alone(self, first: int) -> bool:
        """Whether nothing else leaves the index with these pages."""
        return first in self._block_of or self._is_leaf(first)

    def _detach(self, first: int) -> list[int]:
        """Forget windowed pages of a block, or a block and all after it.

        Returns all pages that left the index, which still have its references.
        """
        if (block := self._block_of.get(first)) is not None:
            there = self._windowed[block]
            there[there.index(first)] = NO_PAGE
            firsts = [first]
        else:
            blocks = self._remove(first)
            there = (self._windowed.pop(block, []) for block in blocks) if self._windowed else ()
            firsts = blocks + [one for kinds in there for one in kinds if one != NO_PAGE]
        pages = self._all_pages(firsts)
        for leave in self.on_remove:
            leave(pages)
        for one in firsts:
            size = len(self._sets.pop(one, (one,)))
            self._block_of.pop(one, None)
            if one in self._in_host:
                del self._in_host[one]
                self.host.take(-size * self.pool.page_bytes)
            else:
                del self._in_pool[one]
        return pages


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
