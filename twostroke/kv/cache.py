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
from twostroke.kv.contents import Contents, Tail
from twostroke.kv.pages import HOST, POOL
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import Stretch, canonical_length, cut

TIERS = (POOL, HOST)
TO_COME = ("disk", "remote")


class PoolHolder(Protocol):
    """Whatever has a pool to put entries into: an `LLM`."""

    @property
    def pool(self) -> PagePool: ...


class KVCache:
    """An immutable sequence of KV entries.

    Values come from `LLM.prefill` and from operations on other values; all share pages by reference count and
    none is ever altered. Pages are freed when the last value that holds them is dropped.

    Attributes:
        pool: whose pages hold the entries.
        tier: where the value asks for them to be, "pool" or "host".
        stretches: where the entries come from.
        tail: what the next stroke starts from.
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
        if hasattr(self, "_next"):  # not when __init__ failed before it had its references
            self.pool.release(self._table[:, PAGE], self.tier)

    def __copy__(self) -> KVCache:
        return self  # never altered, so nobody needs another; a field by field copy would not count its references

    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        return self

    @classmethod
    def empty(cls, pool: PagePool) -> KVCache:
        """The value of no entries, from which every prefill starts."""
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
        """The position of each entry, strictly increasing (but where `resumed_at` said otherwise)."""
        return spans.positions(self._table).tolist()

    @property
    def next_position(self) -> int:
        """The position the next entry will take."""
        return self._next

    @property
    def pending(self) -> int | None:
        """The token sampled last and not entered yet; the next stroke enters it first."""
        return self.tail.pending if self.tail else None

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of the entries, exactly: layers x 2 x KV heads x head_dim x element size x len."""
        return len(self) * self.pool.entry_bytes

    @property
    def overhead_bytes(self) -> int:
        """Bytes that the value holds besides K and V: spans, tokens, provenance and tail, some shared with others."""
        before = sum(stretch.before.nbytes for stretch in self.stretches)
        tail = 0 if self.tail is None else self.tail.nbytes
        return self._table.nbytes + self._tokens.nbytes + before + tail

    @property
    def num_pages(self) -> int:
        """Pages held, shared ones included."""
        return len(np.unique(self._table[:, PAGE]))

    @property
    def fingerprint(self) -> str:
        """Names layers, KV heads, head_dim, RoPE, KV dtype and tokenizer: what must agree for values to meet."""
        return self.pool.geometry.fingerprint

    @property
    def table(self) -> np.ndarray:
        """[P, 4] int32 spans: page id (see `pool`), START, STOP, POSITION; not to be written to."""
        return self._table

    @property
    def token_array(self) -> np.ndarray:
        """The tokens as int32; not to be written to."""
        return self._tokens

    def canonical_length(self, model: str) -> int:
        """How many leading entries the weights `model` computed over exactly the tokens before each."""
        return canonical_length(self.stretches, self._tokens, model)

    def entries(self) -> np.ndarray:
        """A copy of K and V: [layers, 2, len, Hkv, D], for study and tests.

        numpy's, in the pool's dtype; bfloat16 is that of `ml_dtypes`: `.astype(np.float32)` to compute with it.
        """
        return self.pool.read(*spans.pages_and_slots(self._table))

    def keys(self, layer: int) -> np.ndarray:
        """A copy of one layer's K, as RoPE turned it: [len, Hkv, D], in the pool's dtype as `entries` is."""
        return self.pool.read_keys(layer, *spans.pages_and_slots(self._table))

    def __repr__(self) -> str:
        positions = self.positions
        where = f"positions {positions[0]} to {positions[-1]}, " if positions else ""
        tier = "" if self.tier == POOL else f" of the {self.tier}"
        return f"KVCache({len(self)} entries, {where}{self.nbytes:,} bytes in {self.num_pages} pages{tier})"

    # Operations ------------------------------------------------------------------------------------------------

    def __getitem__(self, which: slice) -> KVCache:
        """`kv[a:b]`: these entries, at the positions they have. Steps other than 1 are not possible."""
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
        """All entries but the last, whose position is the next one: for computing it again."""
        return self[:-1].resumed_at(self._next - 1)

    def resumed_at(self, position: int) -> KVCache:
        """The same entries, turned as they are; the next one will take this position, be it behind them or not."""
        if position < 0:
            raise KVError(f"positions begin at 0: {position} is none")
        return KVCache(self.pool, self._table, self._tokens, self.stretches, position, self.tail, self.tier)

    def __add__(self, other: KVCache) -> KVCache:
        """Concatenation. Positions must be strictly increasing; the right value comes to where the left one is.

        Where two parts of a page meet that fit together, as when a value is cut in the middle of a page and spliced,
        the joined value has them in one page, a copy: it lies in memory, and is computed with, as one written whole.

        Raises:
            KVError: positions overlap. GeometryMismatch: the fingerprints differ. OutOfPages: no room for a copy.
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
        """(the span that the last one makes with this one in one page, None if they do not fit; a page made for it)."""
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
        """The same entries, with another start for the next stroke."""
        return KVCache(self.pool, self._table, self._tokens, self.stretches, self._next, tail, self.tier)

    # Places ----------------------------------------------------------------------------------------------------

    def to(self, tier: str) -> KVCache:
        """The same value in another tier: "pool", where strokes compute, or "host", ordinary memory.

        A page moves once, whoever shares it, and takes room in a tier while a value there holds it. So the value in the
        host keeps no page of the pool from being used again, once those in the pool are dropped. It can be cut, joined,
        saved and copied as any other, and a stroke that is given one brings it back.

        Raises:
            OutOfPages: no room there; nothing is changed. KVError: there is no such tier.
        """
        if tier not in TIERS:
            to_come = tier in TO_COME
            reason = "is not there yet: save the value to a file" if to_come else f"is none: use {' or '.join(TIERS)}"
            raise KVError(f"the tier {tier!r} {reason}")
        if tier == self.tier:
            return self
        pages = spans.distinct_pages(self._table)
        self.pool.bring(pages, spans.filled(self._table, pages), tier)
        try:
            return KVCache(self.pool, self._table, self._tokens, self.stretches, self._next, self.tail, tier)
        finally:
            self.pool.release(pages, tier)  # the value holds its own references

    def copy_to(self, pool: PagePool) -> KVCache:
        """The same value in a pool of the same geometry; in its own pool, the value in the tier "pool".

        Slots stay the same, page by page, so attention walks the copy exactly as it walks the original.

        Raises:
            GeometryMismatch, or KVError for another page size. OutOfPages: no room. Nothing is changed then.
        """
        if pool is self.pool:
            return self.to(POOL)
        pool.geometry.require(self.pool.geometry, "this value cannot be placed here")
        if self.pool.page_size != pool.page_size:
            raise KVError(f"this value has pages of {self.pool.page_size} entries, and the pool has {pool.page_size}")
        pages = spans.distinct_pages(self._table)
        fresh = np.array(pool.allocate(len(pages)), np.int64)
        try:
            for page, copy, stop in zip(pages, fresh, spans.filled(self._table, pages), strict=True):
                if pool.memory.layout == self.pool.memory.layout:
                    pool.put(copy, self.pool.page(page), stop)
                else:
                    slots = np.arange(stop)
                    pool.write(np.full_like(slots, copy), slots, self.pool.read(np.full_like(slots, page), slots))
                    pool.claim(copy, 0, stop)
            table = spans.with_pages(self._table, pages, fresh)
            return KVCache(pool, table, self._tokens, self.stretches, self._next, self.tail)
        finally:
            pool.release(fresh)  # the value, if it came to be, holds its own references

    def save(self, path: str | Path) -> None:
        """Write the value to a file (see `stream`); what was there before stays until all is written.

        Raises KVError if it cannot be written.
        """
        with stream.saving(Path(path)) as out:
            self.write_to(out)

    @classmethod
    def load(cls, path: str | Path, llm: PoolHolder) -> KVCache:
        """Read a value back into `llm`'s pool.

        Its entries are canonical for who computed them only if this user saved the file. From anybody else it is a
        value like any other whose entries are not canonical, and without logits.

        Raises:
            CorruptFile: not such a file, truncated, altered or hostile. GeometryMismatch: saved under another geometry.
            OutOfPages: no room. KVError: it cannot be read, or has pages of another size.
        """
        with stream.opened(Path(path)) as source:
            return cls.read_from(source, llm.pool)

    def write_to(self, out: BinaryIO) -> None:
        """Write the value as a stream."""
        contents = Contents(self._table, self._tokens, self.stretches, self._next, self.tail)
        stream.write(out, self.pool, contents)

    @classmethod
    def read_from(cls, source: stream.Source, pool: PagePool) -> KVCache:
        """Read what `write_to` wrote, to the end of a file. Raises as `load`."""
        contents = stream.read(source, pool)
        try:
            table = contents.table
            return cls(pool, table, contents.tokens, contents.stretches, contents.next_position, contents.tail)
        finally:
            pool.release(spans.distinct_pages(contents.table))  # the value holds its own references
