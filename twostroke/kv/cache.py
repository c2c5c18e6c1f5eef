"""The KV cache as a value: an immutable sequence of entries that shares its pages with other values.

An entry is a token, its position, and its K (after RoPE) and V in every layer. Slicing keeps positions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from twostroke.backends.interface import POSITION
from twostroke.errors import KVError
from twostroke.kv import spans, states, stream
from twostroke.kv.cache_view import CacheView
from twostroke.kv.entries import EntryTable, Tail
from twostroke.kv.entries_by_head import biased, checked_indices, gathered, written
from twostroke.kv.other_entries import converted, moved, require_positions
from twostroke.kv.page_contents import copy_pages, require_page_size
from twostroke.kv.pages import POOL
from twostroke.kv.pool import PagePool
from twostroke.kv.swap_in import SwapIn
from twostroke.kv.tier_moves import join_pages, require_tier, retain_in_tier
from twostroke.system.interrupts import uninterrupted


class PoolHolder(Protocol):
    """An object with a page pool, such as an `LLM`."""

    @property
    def pool(self) -> PagePool: ...


class KVCache(CacheView):
    """An immutable sequence of KV entries.

    Values come from `LLM.prefill` and from operations on other values. They share reference-counted pages and never
    change. A page is freed when the last value that holds it is dropped. Ctrl-C waits for the end of an operation that
    takes pages, which would have no owner otherwise; a second one, 1 s later or more, does not wait.
    """

    __slots__ = ()

    def __copy__(self) -> KVCache:
        return self  # immutable, so no copy is needed; a copy field by field would not count its references

    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        return self

    @classmethod
    def empty(cls, pool: PagePool) -> KVCache:
        """A value without entries, from which every prefill starts."""
        return cls(pool, EntryTable.empty(pool.num_groups, bool(pool.geometry.states)))

    @classmethod
    @uninterrupted
    def of_entries(
        cls,
        llm: PoolHolder,
        keys: np.ndarray,
        values: np.ndarray,
        positions: np.ndarray | Sequence[int],
        tokens: Sequence[int] | None = None,
        bias: np.ndarray | None = None,
    ) -> KVCache:
        """A value of entries that a technique has made, such as merged or fitted ones. They are canonical for no model.

        Args:
            llm: in whose pool they are placed, as its `kv_dtype` says.
            keys, values: [layers with K and V of their own, KV heads, n, head_dim], finite, with K as after RoPE.
            positions: [n] or [layers, KV heads, n] integers, which rise for each head: where K is rotated to.
            tokens: n ids that stand for the entries, as where penalties count a prompt's tokens; None: all 0.
            bias: as `with_bias` takes it; None: 0.

        Raises:
            KVError: other shapes or positions, or the model has windows, states, or layers of different shapes.
            OutOfPages: no room.
        """
        places = np.asarray(positions)
        if not (count := places.shape[-1] if places.ndim else 0):
            raise KVError("there are no entries: give at least one position")
        ids = np.zeros(count, np.int32) if tokens is None else np.asarray(tokens, np.int32)
        made = cls._in_fresh_pages(llm.pool, *written(llm.pool, keys, values, places, ids))
        return made if bias is None else made.with_bias(bias)

    # Operations ------------------------------------------------------------------------------------------------

    def __getitem__(self, which: slice) -> KVCache:
        """`kv[a:b]`: entries a to b, with unchanged positions. Raises KVError for other indices and steps."""
        if not isinstance(which, slice):
            raise KVError(f"a KV cache is cut by slices such as kv[a:b], not by {which!r}")
        start, stop, step = which.indices(len(self))
        if step != 1:
            raise KVError(f"a KV cache is cut into contiguous slices; step {step} is not possible")
        stop = max(start, stop)
        part = self.entry_table.cut(start, stop)
        if start and self.pool.geometry.states and start < stop and not part.snapshots:
            # The state is what it was: a state has no parts.
            return self._closed(self.entry_table.cut(0, stop), lambda whole: whole.cut(start, stop))
        return KVCache(self.pool, part, self.tier)

    def _closed(self, contents: EntryTable, change: Callable[[EntryTable], EntryTable]) -> KVCache:
        """`contents` of this value, with the state known at their end, after a change."""
        if self.tier != POOL:
            return self.to(POOL)._closed(contents, change).to(self.tier)
        made, fresh = states.closed(self.pool, contents)
        try:
            return KVCache(self.pool, change(made), self.tier)
        finally:
            self.pool.release(fresh)  # the value holds its own references

    def without_last(self) -> KVCache:
        """All entries except the last. The next entry takes the last one's position, to compute it again.

        Raises KVError if its heads hold different entries (`gather`).
        """
        heads = self.entry_table.head_positions
        if heads is not None and len(heads) and (heads[-1] != heads[-1, 0, 0]).any():
            raise KVError(
                "the last entry cannot be computed again, since heads hold different ones there: join it behind, as in "
                "kv[:-1].gather(indices) + kv[-1:], or enter a token"
            )
        return self[:-1].resumed_at(self.next_position - 1)

    def resumed_at(self, position: int) -> KVCache:
        """The same entries with another position, at least 0, for the next one. K is not rotated again."""
        position = _position(position)
        if position < 0:
            raise KVError(f"positions begin at 0: {position} is not a position")
        if self.pool.geometry.states and position != self.next_position:  # chunks end at other places then
            return self._closed(self.entry_table, lambda whole: replace(whole, next_position=position))
        return KVCache(self.pool, replace(self.entry_table, next_position=position), self.tier)

    @uninterrupted
    def at(self, position: int) -> KVCache:
        """The same entries as a block elsewhere: the first one lies at `position`, as in `a + b.at(a.next_position)`.

        K turns by the distance in each layer's RoPE, and V is copied.
        What is moved by 0 is this value. Otherwise K is computed in float32 from what is stored and rounded again, each
        time: so move the original, not what was moved before. Nothing of it is canonical, since its entries have not
        seen what lies before them now (techniques compute some of them again: EPIC, Hu et al. 2024, arXiv:2410.15332;
        CacheBlend, Yao et al. 2024, arXiv:2405.16444). Logits at its end are left out, and the next stroke computes
        them again; a pending token stays. States of recurrent layers know no positions, and are what they were at the
        end. What windowed layers have given back stays so.

        Raises:
            KVError: an entry would lie before 0 or past the model's positions. OutOfPages: no room for the new K.
            PageLost: its pages are gone or damaged. After an error nothing has changed.
        """
        position = _position(position)
        if not len(self):
            return self.resumed_at(position)
        if not (distance := position - int(self.table[0, POSITION])):
            return self
        require_positions(self.pool, self.entry_table, distance)
        if self.tier != POOL:
            return self.to(POOL).at(position).to(self.tier)
        closed = self.resumed_at(self.next_position + distance)
        return self._in_fresh_pages(self.pool, *moved(self.pool, closed.entry_table, distance))

    @uninterrupted
    def gather(self, indices: np.ndarray) -> KVCache:
        """Other entries for each head: slot j of head h in layer l holds entry `indices[l, h, j]`.

        Slots are then what entries were: the value is cut, joined, extended, moved, saved and sent as any other. Each
        entry keeps the K that its position gave it (`head_positions`). Slots have adjacent positions, of which the last
        is that of the last entry chosen by any head, and the tokens of the first layer's first head. Nothing of it is
        canonical. Logits at the end stay if all heads end with the last entry. Otherwise join the last entries behind,
        as in `kv[:-1].gather(indices) + kv[-1:]`, or enter further tokens.

        Heads may hold different numbers of entries: -1 leaves a slot empty. Attention takes time for the others alone,
        in whole pages. Memory is that of the head with most, or with `kv_groups="layers"` of each layer's.

        Args:
            indices: integers [layers with K and V of their own, KV heads, n], rising for each head. A head with fewer
                entries begins with -1.

        Raises:
            KVError: other indices, or the model has windows, states, or layers of different shapes. OutOfPages: no
                room for the entries. PageLost: its pages are gone or damaged. After an error nothing has changed.
        """
        chosen = checked_indices(self.pool.geometry, len(self), indices)
        if not chosen.shape[-1]:
            return self[len(self) :]
        return self._in_fresh_pages(self.pool, *gathered(self.pool, self.entry_table, chosen)).to(self.tier)

    def with_bias(self, bias: np.ndarray) -> KVCache:
        """The same entries with a number that each head adds to the score of an entry, in place of what they have.

        log n makes an entry count as n equal ones, as where a technique has merged them; -inf hides it, so that heads
        see different numbers of entries. Entries that come later have 0. The bias is kept by cuts, `+`, `gather`, `at`,
        files and the wire; it takes 4 bytes an entry, layer and head of ordinary memory. Nothing of the value is
        canonical, and logits at its end are left out.

        Args:
            bias: floats [layers with K and V of their own, KV heads, n], in nats, finite or -inf.

        Raises:
            KVError: another shape, nan or inf, a number for what `gather` has left out; or windows, states, or layers
                of different shapes. A stroke raises it where the backend cannot: ranks of the reference and of Triton.
        """
        return KVCache(self.pool, biased(self.pool, self.entry_table, bias), self.tier)

    @classmethod
    def _in_fresh_pages(cls, pool: PagePool, contents: EntryTable, fresh: np.ndarray) -> KVCache:
        try:
            return cls(pool, contents)
        finally:
            pool.release(fresh)  # the value holds its own references

    def with_tail(self, tail: Tail | None) -> KVCache:
        """The same entries with another tail."""
        return KVCache(self.pool, replace(self.entry_table, tail=tail), self.tier)

    @uninterrupted
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
            self.entry_table.require_before(other.entry_table)
        other = (other if other.pool is self.pool else other.copy_to(self.pool)).to(self.tier)
        if not len(self):
            return other
        seam, fresh = self._seam(other.table[0])
        try:
            return KVCache(self.pool, self.entry_table.followed_by(other.entry_table, seam), self.tier)
        finally:
            self.pool.release(fresh, self.tier)  # the value holds its own references

    def _seam(self, right: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Join the last span with `right` in one page of each group.

        Returns (the joined span, or None if they do not fit; the pages allocated for it).
        """
        start, stop, position, *pages = self.table[-1].tolist()
        other_start, other_stop, other_position, *others = right.tolist()
        nothing, pairs = np.zeros(0, np.int64), list(zip(pages, others, strict=True))
        fits = stop == other_start and position + stop - start == other_position
        if not fits or any(mine != theirs and spans.NO_PAGE in (mine, theirs) for mine, theirs in pairs):
            return None, nothing
        fresh: list[int] = []
        try:
            for group, (mine, theirs) in enumerate(pairs):
                if mine != theirs:
                    pages[group] = join_pages(self.pool, mine, theirs, stop, other_stop, self.tier)
                    fresh.append(pages[group])
        except BaseException:
            self.pool.release(np.array(fresh, np.int64), self.tier)
            raise
        return np.array([start, other_stop, position, *pages], np.int32), np.array(fresh, np.int64)

    # Tiers, pools and files ------------------------------------------------------------------------------------

    @uninterrupted
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
        require_tier(self.pool, tier)
        if tier == self.tier:
            return self
        pages, stops = self.entry_table.pages_and_stops(self.pool.page_size)
        retain_in_tier(self.pool, pages, stops, tier)
        try:
            return KVCache(self.pool, self.entry_table, tier)
        finally:
            self.pool.release(pages, tier)  # the value holds its own references

    def swap_in(self) -> SwapIn:
        """Begin to bring the value's pages into the pool, in three phases. The value must be held meanwhile.

        Raises OutOfPages: nothing has changed.
        """
        return SwapIn(self.pool, np.unique(self.entry_table.pages))

    @uninterrupted
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
        require_page_size(pool, self.pool.page_size)
        pages, stops = self.entry_table.pages_and_stops(self.pool.page_size)
        pool.make_room(len(pages), collect=True)
        fresh = np.array(pool.allocate(len(pages), self.pool.group_of[pages]), np.int64)
        try:
            copy_pages(self.pool, pages, stops, pool, fresh)
            return KVCache(pool, self.entry_table.in_pages(pages, fresh))
        finally:
            pool.release(fresh)  # the new value, if any, holds its own references

    @uninterrupted
    def to_dtype(self, llm: PoolHolder) -> KVCache:
        """The entries in `llm`'s pool, as its `kv_dtype` says: the same model with K and V in more or fewer bits.

        The model there can use it, and nothing of it is canonical: its K and V were rounded twice. With the same dtype
        it is `copy_to`.

        Raises:
            GeometryMismatch: more than the dtype differs. KVError: the page sizes differ, or the model has recurrent
                layers. OutOfPages: no room. PageLost: its pages are gone or damaged. Then nothing has changed.
        """
        if llm.pool.geometry.kv_dtype == self.pool.geometry.kv_dtype:
            return self.copy_to(llm.pool)
        return self._in_fresh_pages(llm.pool, *converted(self.pool, self.entry_table, llm.pool))

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
        """Write the value as a stream. Raises PageLost."""
        stream.write(out, self.pool, self.entry_table)

    @classmethod
    @uninterrupted
    def read_from(cls, source: stream.StreamReader, pool: PagePool) -> KVCache:
        """Read what `write_to` wrote, to the end of the source. Raises the errors of `load`."""
        entry_table = stream.read(source, pool)
        return cls._in_fresh_pages(pool, entry_table, np.unique(entry_table.pages))


def _position(given: object) -> int:
    """Raises KVError for what is no integer."""
    try:
        return operator.index(given)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise KVError(f"a position is an integer, not {given!r:.60}") from None
