"""The KV cache as a value: an immutable sequence of entries that shares its pages with other values.

An entry is a token, its position, and its K (after RoPE) and V in every layer. Slicing keeps positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.errors import KVError
from twostroke.kv import storage
from twostroke.kv.contents import Contents, Tail
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import Stretch, canonical_length, cut


class PoolHolder(Protocol):
    """Whatever has a pool to put entries into: an `LLM`."""

    @property
    def pool(self) -> PagePool: ...


class KVCache:
    """An immutable sequence of KV entries.

    Values come from `LLM.prefill` and from operations on other values; all share pages by reference count and
    none is ever altered. Pages are freed when the last value that holds them is dropped.
    """

    __slots__ = ("_next", "_table", "_tokens", "pool", "stretches", "tail")

    def __init__(
        self,
        pool: PagePool,
        table: np.ndarray,
        tokens: np.ndarray,
        stretches: tuple[Stretch, ...],
        next_position: int,
        tail: Tail | None = None,
    ) -> None:
        """Take one reference to every page of `table` ([P, 4] int32 spans). Use `LLM.prefill` or `empty` instead."""
        self.pool, self.stretches, self.tail = pool, stretches, tail
        self._table, self._tokens = table, tokens
        pool.retain(table[:, PAGE])
        self._next = next_position

    def __del__(self) -> None:
        if hasattr(self, "_next"):  # not when __init__ failed before it had its references
            self.pool.release(self._table[:, PAGE])

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
        return _positions(self._table).tolist()

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
    def num_pages(self) -> int:
        """Pages held, shared ones included."""
        return len(np.unique(self._table[:, PAGE]))

    @property
    def fingerprint(self) -> str:
        """Names layers, KV heads, head_dim, RoPE, KV dtype and tokenizer: what must agree for values to meet."""
        return self.pool.geometry.fingerprint

    @property
    def table(self) -> np.ndarray:
        """[P, 4] int32 spans, columns PAGE, START, STOP, POSITION; not to be written to."""
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
        return self.pool.read(*_pages_and_slots(self._table))

    def keys(self, layer: int) -> np.ndarray:
        """A copy of one layer's K, as RoPE turned it: [len, Hkv, D], in the pool's dtype as `entries` is."""
        return self.pool.read_keys(layer, *_pages_and_slots(self._table))

    def __repr__(self) -> str:
        positions = self.positions
        where = f"positions {positions[0]} to {positions[-1]}, " if positions else ""
        return f"KVCache({len(self)} entries, {where}{self.nbytes:,} bytes in {self.num_pages} pages)"

    # Operations ------------------------------------------------------------------------------------------------

    def __getitem__(self, which: slice) -> KVCache:
        """`kv[a:b]`: these entries, at the positions they have. Steps other than 1 are not possible."""
        if not isinstance(which, slice):
            raise KVError(f"a KV cache is cut by slices such as kv[a:b], not by {which!r}")
        start, stop, step = which.indices(len(self))
        if step != 1:
            raise KVError(f"a KV cache is cut into contiguous slices; step {step} is not possible")
        stop = max(start, stop)
        table = _cut(self._table, start, stop)
        if stop == len(self):
            next_position = self._next
        elif stop > start:
            next_position = _end(table)
        else:
            next_position = int(_positions(self._table)[stop])
        keeps_last = stop == len(self) and stop > start
        stretches = cut(self.stretches, self._tokens, start, stop)
        return KVCache(
            self.pool, table, self._tokens[start:stop], stretches, next_position, self.tail if keeps_last else None
        )

    def without_last(self) -> KVCache:
        """All entries but the last, whose position is the next one: for computing it again."""
        return self[:-1].resumed_at(self._next - 1)

    def resumed_at(self, position: int) -> KVCache:
        """The same entries, turned as they are; the next one will take this position, be it behind them or not."""
        if position < 0:
            raise KVError(f"positions begin at 0: {position} is none")
        return KVCache(self.pool, self._table, self._tokens, self.stretches, position, self.tail)

    def __add__(self, other: KVCache) -> KVCache:
        """Concatenation. Positions must be strictly increasing; a value of another pool is copied into this one's.

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
        if not len(self):
            return other.copy_to(self.pool)
        last, first = _end(self._table) - 1, int(other._table[0, POSITION])
        if first <= last:
            raise KVError(f"positions must increase: the left value ends at {last} and the right one begins at {first}")
        other = other.copy_to(self.pool)
        left, right = self._table, other._table
        seam, fresh = _seam(self.pool, left[-1], right[0])
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
            )
        finally:
            self.pool.release(fresh)  # the value holds its own reference

    def with_tail(self, tail: Tail | None) -> KVCache:
        """The same entries, with another start for the next stroke."""
        return KVCache(self.pool, self._table, self._tokens, self.stretches, self._next, tail)

    def copy_to(self, pool: PagePool) -> KVCache:
        """The same value in another pool of the same geometry; itself if it is there already.

        Slots stay the same, page by page, so attention walks the copy exactly as it walks the original.
        """
        return self if pool is self.pool else KVCache.placed(pool, self.contents(), "this value")

    def contents(self) -> Contents:
        """All there is to the value, K and V copied out of its pages."""
        spans = self._table.copy()
        spans[:, PAGE] = 0
        return Contents(
            self.pool.geometry,
            self.pool.page_size,
            spans,
            self._tokens,
            self.stretches,
            self._next,
            self.tail,
            self.entries(),
        )

    @classmethod
    def placed(cls, pool: PagePool, contents: Contents, what: str) -> KVCache:
        """Put contents into fresh pages of a pool; `what` names them in errors.

        Raises:
            GeometryMismatch, or KVError for another page size. OutOfPages: no room. Nothing is changed then.
        """
        pool.geometry.require(contents.geometry, f"{what} cannot be placed here")
        if contents.page_size != pool.page_size:
            raise KVError(f"{what} has pages of {contents.page_size} entries, and the pool has {pool.page_size}")
        table = contents.spans.copy()
        table[:, PAGE] = pool.allocate(len(table))
        try:
            pool.write(*_pages_and_slots(table), contents.entries)
            for page, _, stop, _ in table.tolist():
                pool.claim(page, 0, stop)
            return cls(pool, table, contents.tokens, contents.stretches, contents.next_position, contents.tail)
        finally:
            pool.release(table[:, PAGE])  # the value, if it came to be, holds its own references

    def save(self, path: str | Path) -> None:
        """Write the value to a file, with fingerprint and checksum; what was there before stays until all is written.

        Raises KVError if it cannot be written.
        """
        storage.write(storage.encode(self.contents()), Path(path))

    @classmethod
    def load(cls, path: str | Path, llm: PoolHolder) -> KVCache:
        """Read a value back into `llm`'s pool.

        Raises:
            CorruptFile: not such a file, truncated or altered. GeometryMismatch: saved under another geometry.
            OutOfPages: no room. KVError: it cannot be read.
        """
        path = Path(path)
        return cls.placed(llm.pool, storage.decode(storage.read(path), path), f"{path}: this value")


def _counts(table: np.ndarray) -> np.ndarray:
    return table[:, STOP] - table[:, START]


def _end(table: np.ndarray) -> int:
    """The position after the last entry."""
    _, start, stop, position = table[-1].tolist()
    return position + stop - start


def _positions(table: np.ndarray) -> np.ndarray:
    """The position of each entry: spans are contiguous runs."""
    counts = _counts(table)
    starts = np.cumsum(counts) - counts
    return np.repeat(table[:, POSITION] - starts, counts) + np.arange(counts.sum())


def _pages_and_slots(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = _counts(table)
    starts = np.cumsum(counts) - counts
    slots = np.repeat(table[:, START] - starts, counts) + np.arange(counts.sum())
    return np.repeat(table[:, PAGE], counts), slots


def _seam(pool: PagePool, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """(the span that two spans make in one page, None where they do not fit together; a page allocated for it)."""
    page, start, stop, position = left.tolist()
    other, other_start, other_stop, other_position = right.tolist()
    nothing = np.zeros(0, np.int64)
    if stop != other_start or position + stop - start != other_position:
        return None, nothing
    if page == other:
        return np.array([page, start, other_stop, position], np.int32), nothing
    (copy,) = pool.allocate(1)
    pool.copy_slots(page, copy, start, stop)
    pool.copy_slots(other, copy, stop, other_stop)
    return np.array([copy, start, other_stop, position], np.int32), np.array([copy])


def _cut(table: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The spans of entries [start, stop): whole pages shared, the first and the last perhaps in part."""
    ends = np.cumsum(_counts(table))
    if start >= stop:
        return table[:0]
    first, last = np.searchsorted(ends, [start, stop - 1], side="right")
    part = table[first : last + 1].copy()
    part[-1, STOP] -= ends[last] - stop
    dropped = start - (ends[first] - _counts(table)[first])
    part[0, START] += dropped
    part[0, POSITION] += dropped
    return part
