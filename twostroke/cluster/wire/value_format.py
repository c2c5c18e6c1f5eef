"""The wire form of a value: pages as they are in memory, entries of pages that it uses in part, header and logits.

Pages have numbers, in the order in which they are sent; the header names them by these. A page of which a value uses
some slots only goes as these entries, so the bytes that move are those of the value's entries and no others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.backends.page_memory import Layout
from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv import stream_header as headers
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable
from twostroke.kv.geometry import Geometry
from twostroke.kv.page_contents import PageSource
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.stream_header import StreamHeader

GROUP_BYTES = 8 << 20  # of entries that go at once
PIECE_BYTES = 4 << 20  # of pages that go at once, and are digested while they are in a cache


@dataclass(frozen=True)
class PartialPage:
    """A page that a value uses in part: its number, the page, its group of layers, and the slots in use."""

    number: int
    page: int
    group: int
    slots: np.ndarray


@dataclass(frozen=True)
class CompleteValue:
    """A value that is complete, as it is sent."""

    kv: KVCache  # the value
    header: str  # the text of its header, over pages 0 to n - 1
    order: list[int]  # the number of each of these pages in the transfer
    whole: list[int]  # the pages that go as they are, by number, beginning with those that were promised before
    parts: list[PartialPage]  # those that go as entries
    logits: np.ndarray  # [vocab] float32, or [0]
    state: Any  # what the caller sends along, for JSON
    queries: Queries  # those of its last entries, for techniques that choose by attention

    @classmethod
    def of(
        cls, kv: KVCache, promised: Sequence[int], logits: np.ndarray, state: Any, queries: Queries
    ) -> "CompleteValue":
        """`promised`: pages of the value whose numbers are given, since they may have been sent: 0 and so on.

        It takes some time for a long value. The logits are those of `logits_of`.
        """
        table, pool = kv.table, kv.pool
        known = set(promised)
        whole = [*promised, *(page for page in whole_pages(kv) if page not in known)]
        numbers = {page: number for number, page in enumerate(whole)}
        parts = _parts(table, set(whole), len(whole))
        numbers |= {part.page: part.number for part in parts}
        pages, _ = kv.entry_table.pages_and_stops(pool.page_size)
        said = kv.entry_table.in_pages(pages, np.arange(len(pages)))
        header = StreamHeader(pool.geometry, pool.page_size, pool.memory.layout, len(pages), said, len(logits))
        return cls(
            kv,
            headers.encode(header).decode(),
            [numbers[page] for page in pages.tolist()],
            whole,
            parts,
            logits,
            state,
            queries,
        )

    @property
    def num_pages(self) -> int:
        """Number of pages that the receiver reserves."""
        return len(self.whole) + len(self.parts)


@dataclass(frozen=True)
class ValueDescription:
    """What a receiver knows of a value before all of it has come."""

    header: StreamHeader  # over pages 0 to n - 1
    # order, logits, state, queries: as in `CompleteValue`
    order: np.ndarray
    logits: np.ndarray
    queries: Queries
    state: Any


def _parts(table: np.ndarray, whole: set[int], first: int) -> list[PartialPage]:
    """The slots in use of each page of a table that does not go as a whole; numbers begin at `first`."""
    rest = [(page, *used) for page, used in spans.used_slots(table).items() if page not in whole]
    return [PartialPage(first + i, page, group, slots) for i, (page, group, slots) in enumerate(rest)]


def logits_of(kv: KVCache) -> np.ndarray:
    """The logits in a value's tail, [vocab] float32; [0] if it has none."""
    logits = None if kv.tail is None else kv.tail.logits
    return np.asarray([] if logits is None else logits, np.float32)


STATES_NEED_PAGES = "states go only where pages have the same form: give both sides the same backend and page_size"


def whole_pages(kv: KVCache, windowed: bool = True) -> list[int]:
    """The pages of which a value uses every slot, in order of first use, and those of states.

    Without `windowed`, neither those of windowed layers nor of states, which may be given back.
    """
    table, size = kv.table, kv.pool.page_size
    full = table[spans.counts(table) == size]
    columns = [g for g, window in enumerate(kv.pool.geometry.windows) if windowed or window is None]
    pages = full[:, PAGE:][:, columns].ravel()
    states: list[int] = kv.entry_table.snapshot_pages.tolist() if windowed else []
    return list(dict.fromkeys([*pages[pages != NO_PAGE].tolist(), *states]))


def piece(sources: Sequence[PageSource]) -> int:
    """Number of pages that go in one message."""
    return max(1, PIECE_BYTES // sources[0].memory.page_bytes)


def pieces(count: int, size: int) -> list[slice]:
    """So many pages, in pieces of a size."""
    return [slice(first, first + size) for first in range(0, count, size)]


def value(pool: PagePool, contents: EntryTable, logits: np.ndarray) -> KVCache:
    """The value that has arrived in pages of the pool; the caller still releases its own references to them."""
    tail = contents.tail
    if tail is not None and len(logits):
        tail = replace(tail, row=StoredLogits(logits[None]))
    return KVCache(pool, replace(contents, tail=tail))


def repaged(pool: PagePool, header: StreamHeader) -> EntryTable:
    """The contents of a value whose entries are placed anew, one after another, in pages 0 and so on of a pool.

    Entries that lose bits are canonical for no model. Raises KVError if pages that begin elsewhere would lack entries
    of windowed layers or of heads, among them some that the next token attends to, or if the model has states.
    """
    if pool.geometry.states:
        raise KVError(STATES_NEED_PAGES)
    contents, size, groups = header.contents, pool.page_size, pool.num_groups
    positions = spans.positions(contents.table)
    slots = np.arange(len(positions)) % size
    starts = np.flatnonzero((slots == 0) | (np.diff(positions, prepend=-2) != 1))
    counts = np.diff(np.append(starts, len(positions)))
    # Page i of each group in turn. A page that lacks an entry is as good as none: no query sees such an entry.
    there = np.stack([spans.places(contents.table, group)[0] != NO_PAGE for group in range(groups)], 1)
    whole = np.logical_and.reduceat(there, starts) if len(starts) else there
    pages = (starts // size)[:, None] * groups + np.arange(groups)
    used = np.unique(pages[whole])
    pages = np.where(whole, np.searchsorted(used, pages), NO_PAGE)
    table = np.column_stack([slots[starts], slots[starts] + counts, positions[starts], pages]).astype(np.int32)
    if pool.geometry.complete(contents) and not pool.geometry.complete(replace(contents, table=table)):
        raise KVError(
            f"layers of this value lack entries that would fill pages of {size}, since its own begin "
            f"elsewhere: give both sides the same backend and page_size"
        )
    stretches = contents.stretches
    if header.geometry.kv_dtype != pool.geometry.kv_dtype:
        stretches = (Stretch(len(positions), None, NOTHING),) if len(positions) else ()
    return replace(contents, table=table, stretches=stretches)


def without_entries(pool: PagePool) -> str:
    """The header of an empty value, which says what values of a pool are made of."""
    return _of_nothing(pool.geometry, pool.page_size, pool.memory.layout)


@lru_cache(16)
def _of_nothing(geometry: Geometry, page_size: int, layout: Layout) -> str:
    return headers.encode(
        StreamHeader(geometry, page_size, layout, 0, EntryTable.empty(len(geometry.groups), bool(geometry.states)), 0)
    ).decode()


def digest_of(kv: KVCache) -> str:
    """Stands for a value's tokens and positions: both sides hold the same value if they agree on it."""
    tokens = kv.token_array.astype("<i4").tobytes() + spans.positions(kv.table).astype("<i8").tobytes()
    by_head = kv.entry_table.head_positions, kv.entry_table.bias
    more = [b"" if one is None else one.tobytes() for one in by_head]
    return hashlib.blake2b(b"".join([tokens, *more]), digest_size=16).hexdigest()
