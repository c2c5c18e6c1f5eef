"""The KV cache as a value: an immutable sequence of entries that shares its pages with other values.

An entry is a token, its position, and its K (after RoPE) and V in every layer. Slicing keeps positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from twostroke.backends.interface import PAGE, POSITION
from twostroke.errors import KVError
from twostroke.kv import spans, stream
from twostroke.kv.entries import Contents, Tail
from twostroke.kv.pages import POOL
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import Stretch, canonical_length, cut
from twostroke.kv.swap_in import Arrival


class PoolHolder(Protocol):
    """An object with a page pool, such as an `LLM`."""

    @property
    def pool(self) -> PagePool: ...


class KVCache:
    """An immutable sequence of KV entries.

    Values come from `LLM.prefill` and from operations on other values. They share reference-counted pages and never
    change. A page is freed when the last value that holds it is dropped.

    Attributes:
        pool: the pool whose pages hold the entries.
        tier: the tier in which the value keeps its pages: "pool", "host", "disk" or "remote".
        stretches: provenance of the entries.
        tail: logits or pending token from which the next stroke starts.
    """

    __slots__ = ("_next", "_table", "_tokens", "pool", "stretches", "tail", "tier")

    def __init__(
        self,
        pool: PagePool,
        table: np.ndarray,
        tokens: np.ndarray,
        stretches: tuple[Stretch, ...],
        next_position: int,
        tail: Tail | None = None,
        tier: str = POOL,
    ) -> None:
        """Take one reference to every page of `table` ([P, 4] int32 spans). Use `LLM.prefill` or `empty` instead."""
        self.pool, self.stretches, self.tail, self.tier = pool, stretches, tail, tier
        self._table, self._tokens = table, tokens
        pool.retain(table[:, PAGE], tier)
        self._next = next_position

    def __del__(self) -> None:
        if hasattr(self, "_next"):  # not set if __init__ failed before it took its references
            self.pool.drop(self._table[:, PAGE], self.tier)

    def __copy__(self) -> KVCache:
        return self  # immutable, so no copy is needed; a copy field by field would not count its references

    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        return self

    @classmethod
    def empty(cls, pool: PagePool) -> KVCache:
        """A value without entries, from which every prefill starts."""
        return cls(pool, np.zeros((0, 4), np.int32), np.zeros(0, np.int32), (), 0)

    # Facts -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The token of each entry."""
        return self._tokens.tolist()

    @property
    def positions(self) -> list[int]:
        """The position of each entry, strictly increasing unless `resumed_at` set a position."""
        return spans.positions(self._table).tolist()

    @property
    def next_position(self) -> int:
        """The position of the next entry."""
        return self._next

    @property
    def pending(self) -> int | None:
        """The last sampled token if it is not entered yet; the next stroke enters it first."""
        return self.tail.pending if self.tail else None

    @property
    def nbytes(self) -> int:
        """Exact bytes of K and V of the entries: layers x 2 x KV heads x head_dim x element size x len."""
        return len(self) * self.pool.entry_bytes

    @property
    def overhead_bytes(self) -> int:
        """Bytes besides K and V: spans, tokens, provenance and tail. Some of them are shared with other values."""
        before = sum(stretch.before.nbytes for stretch in self.stretches)
        tail = 0 if self.tail is None else self.tail.nbytes
        return self._table.nbytes + self._tokens.nbytes + before + tail

    @property
    def num_pages(self) -> int:
        """Number of pages held, including shared ones."""
        return len(np.unique(self._table[:, PAGE]))

    @property
    def fingerprint(self) -> str:
        """Digest of layers, KV heads, head_dim, RoPE, KV dtype and tokenizer; values are joined only if it agrees."""
        return self.pool.geometry.fingerprint

    @property
    def table(self) -> np.ndarray:
        """[P, 4] int32 spans: page id (see `pool`), START, STOP, POSITION. Read-only."""
        return self._table

    @property
    def token_array(self) -> np.ndarray:
        """The tokens, [n] int32. Read-only."""
        return self._tokens

    def canonical_length(self, model: str) -> int:
        """Number of leading entries that `model` (an id) computed over exactly the tokens before each."""
        return canonical_length(self.stretches, self._tokens, model)

    def entries(self) -> np.ndarray:
        """A copy of K and V: [layers, 2, len, Hkv, D], for inspection and tests.

        A numpy array in the pool's dtype. bfloat16 is `ml_dtypes.bfloat16`; use `.astype(np.float32)` to compute.
        """
        return self.pool.read(*spans.pages_and_slots(self._table))

    def keys(self, layer: int) -> np.ndarray:
        """A copy of one layer's K after RoPE: [len, Hkv, D], in the pool's dtype like `entries`."""
        return self.pool.read_keys(layer, *spans.pages_and_slots(self._table))

    def __repr__(self) -> str:
        positions = self.positions
        where = f"positions {positions[0]} to {positions[-1]}, " if positions else ""
        tier = "" if self.tier == POOL else f", tier {self.tier}"
        return f"KVCache({len(self)} entries, {where}{self.nbytes:,} bytes in {self.num_pages} pages{tier})"

    # Operations ------------------------------------------------------------------------------------------------

    def __getitem__(self, which: slice) -> KVCache:
        """`kv[a:b]`: entries a to b, with unchanged positions. Raises KVError for other indices and steps."""
        if not isinstance(which, slice):
            raise KVError(f"a KV cache is cut by slices such as kv[a:b], not by {which!r}")
        start, stop, step = which.indices(len(self))
        if step != 1:
            raise KVError(f"a KV cache is cut into contiguous slices; step {step} is not possible")
        stop = max(start, stop)
        table = spans.cut(self._table, start, stop)
        if stop == len(self):
            next_position = self._next
        elif stop > start:
            next_position = spans.end(table)
        else:
            next_position = int(spans.positions(self._table)[stop])
        tail = self.tail if stop == len(self) and stop > start else None
        stretches = cut(self.stretches, self._tokens, start, stop)
        return KVCache(self.pool, table, self._tokens[start:stop], stretches, next_position, tail, self.tier)

    def without_last(self) -> KVCache:
        """All entries except the last. The next entry takes the last one's position, to compute it again."""
        return self[:-1].resumed_at(self._next - 1)

    def resumed_at(self, position: int) -> KVCache:
        """The same entries with another position, at least 0, for the next one. K is not rotated again."""
        if position < 0:
            raise KVError(f"positions begin at 0: {position} is not a position")
        return KVCache(self.pool, self._table, self._tokens, self.stretches, position, self.tail, self.tier)

    def __add__(self, other: KVCache) -> KVCache:
        """Concatenation. Positions must be strictly increasing. The result is in the left value's pool and tier.

        If the seam lies within a page and both parts fit into one page (as when a value is cut there and spliced), the
        result has them in one page, a copy. Its layout and its arithmetic are those of a value written whole.

        Raises:
            KVError: positions overlap. GeometryMismatch: the fingerprints differ. OutOfPages: no room for a copy.
            PageLost: a page to be copied is gone or damaged.
        """
        if not isinstance(other, KVCache):
            return NotImplemented
        self.pool.geometry.require(other.pool.geometry, "these values cannot be joined")
        if not len(other):
            return self
        if len(self):
            last, first = spans.end(self._table) - 1, int(other._table[0, POSITION])
            if first <= last:
                raise KVError(
                    f"positions must increase: the left value ends at {last} and the right one begins at {first}"
                )
        other = (other if other.pool is self.pool else other.copy_to(self.pool)).to(self.tier)
        if not len(self):
            return other
        left, right = self._table, other._table
        seam, fresh = self._seam(right[0])
        if seam is not None:
            left, right = np.concatenate([left[:-1], seam[None]]), right[1:]
        try:
            return KVCache(
                self.pool,
                np.concatenate([left, right]),
                np.concatenate([self._tokens, other._tokens]),
                self.stretches + other.stretches,
                other._next,
                other.tail,
                self.tier,
            )
        finally:
            self.pool.release(fresh, self.tier)  # the value holds its own reference

    def _seam(self, right: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Join the last span with `right` in one page.

        Returns (the joined span, or None if they do not fit; the page allocated for it, [0] or [1]).
        """
        page, start, stop, position = self._table[-1].tolist()
        other, other_start, other_stop, other_position = right.tolist()
        nothing = np.zeros(0, np.int64)
        if stop != other_start or position + stop - start != other_position:
            return None, nothing
        if page == other:
            return np.array([page, start, other_stop, position], np.int32), nothing
        joined = self.pool.joined(page, other, stop, other_stop, self.tier)
        return np.array([joined, start, other_stop, position], np.int32), np.array([joined])

    def with_tail(self, tail: Tail | None) -> KVCache:
        """The same entries with another tail."""
        return KVCache(self.pool, self._table, self._tokens, self.stretches, self._next, tail, self.tier)

    # Places ----------------------------------------------------------------------------------------------------

    def to(self, tier: str) -> KVCache:
        """The same value in another tier.

        "pool" is where strokes compute, "host" is ordinary memory, "disk" and "remote" are the stores that the model
        was opened with. A shared page moves once, and uses room in a tier while a value in that tier holds it. So pages
        of the pool become free when the last value in the pool that holds them is dropped, even if values elsewhere
        remain. A value can be cut, joined, saved and copied in any tier; a stroke moves it back to the pool.

        `kv_host` limits what prefix indexes keep in the host. Values there are the user's and not counted in it: they
        take ordinary memory for as long as they are held (`pool.num_copies` counts all pages there). What lies on disk
        or in the remote store is deleted when it is dropped, or when this process ends: save a value to keep it.

        Raises:
            OutOfPages: no room there. PageLost: its pages are gone or damaged where they were. KVError: there is no
                such tier. After an error nothing has changed.
        """
        self.pool.require(tier)
        if tier == self.tier:
            return self
        pages = spans.distinct_pages(self._table)
        self.pool.bring(pages, spans.filled(self._table, pages), tier)
        try:
            return KVCache(self.pool, self._table, self._tokens, self.stretches, self._next, self.tail, tier)
        finally:
            self.pool.release(pages, tier)  # the value holds its own references

    def arrival(self) -> Arrival:
        """Begin to bring the value's pages into the pool, in three phases. The value must be held meanwhile.

        Raises OutOfPages: nothing has changed.
        """
        return self.pool.arrival(spans.distinct_pages(self._table))

    def copy_to(self, pool: PagePool) -> KVCache:
        """A copy in another pool of the same geometry. For its own pool, the value in the tier "pool".

        Slots stay the same, page by page, so attention reads the copy in the same order as the original.

        Raises:
            GeometryMismatch: the geometries differ. KVError: the page sizes differ. OutOfPages: no room. PageLost: its
                pages are gone or damaged. After an error nothing has changed.
        """
        if pool is self.pool:
            return self.to(POOL)
        pool.geometry.require(self.pool.geometry, "this value cannot be placed here")
        if self.pool.page_size != pool.page_size:
            raise KVError(f"this value has pages of {self.pool.page_size} entries, and the pool has {pool.page_size}")
        pages = spans.distinct_pages(self._table)
        pool.make_room(len(pages))
        fresh = np.array(pool.allocate(len(pages)), np.int64)
        try:
            stops = spans.filled(self._table, pages)
            with self.pool.reading(pages, stops) as sources:
                for source, copy, stop in zip(sources, fresh.tolist(), stops.tolist(), strict=True):
                    if pool.memory.layout == self.pool.memory.layout:
                        pool.put(copy, source.data(), stop)
                    else:
                        slots = np.arange(stop)
                        loose = self.pool.loose_page(np.frombuffer(source.data(), np.uint8))
                        pool.write(np.full_like(slots, copy), slots, loose.read(np.zeros_like(slots), slots))
                        pool.claim(copy, 0, stop)
            table = spans.with_pages(self._table, pages, fresh)
            return KVCache(pool, table, self._tokens, self.stretches, self._next, self.tail)
        finally:
            pool.release(fresh)  # the new value, if any, holds its own references

    def save(self, path: str | Path) -> None:
        """Write the value to a file (see `stream`). An existing file is replaced only when all is written.

        Raises KVError if it cannot be written.
        """
        with stream.saving(Path(path)) as out:
            self.write_to(out)

    @classmethod
    def load(cls, path: str | Path, llm: PoolHolder) -> KVCache:
        """Read a value into `llm`'s pool.

        Its entries stay canonical for their model only if this user saved the file. Otherwise the value is usable,
        but its entries are not canonical and its logits are dropped.

        Raises:
            CorruptFile: not such a file, truncated, altered or hostile. GeometryMismatch: saved under another geometry.
            OutOfPages: no room. KVError: it cannot be read, or its page size differs.
        """
        with stream.opened(Path(path)) as source:
            return cls.read_from(source, llm.pool)

    def write_to(self, out: BinaryIO) -> None:
        """Write the value as a stream."""
        contents = Contents(self._table, self._tokens, self.stretches, self._next, self.tail)
        stream.write(out, self.pool, contents)

    @classmethod
    def read_from(cls, source: stream.Source, pool: PagePool) -> KVCache:
        """Read what `write_to` wrote, to the end of the source. Raises the errors of `load`."""
        contents = stream.read(source, pool)
        try:
            table = contents.table
            return cls(pool, table, contents.tokens, contents.stretches, contents.next_position, contents.tail)
        finally:
            pool.release(spans.distinct_pages(contents.table))  # the value holds its own references
