"""The entries of a value without their K and V: where they lie, their tokens, who computed them, what comes next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from twostroke.backends.interface import POSITION, LazyLogits
from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv.provenance import Stretch, canonical_length, cut


@dataclass(frozen=True)
class Tail:
    """The start of the next stroke: the logits after the last entry, or one token that is not entered yet."""

    model: str  # identity of the model that computed the logits or sampled the token
    # the logits after the last entry, one row, computed when read. It holds a hidden state, a few KB instead of 0.6 MB
    # of logits at a vocabulary of 152,000.
    row: LazyLogits | None = None
    pending: int | None = None  # the last sampled token, if it is not entered yet

    @property
    def logits(self) -> np.ndarray | None:
        """Logits [vocab] float32, computed at each read; None for a tail with a pending token."""
        return None if self.row is None else self.row.read()[0]

    @property
    def nbytes(self) -> int:
        """Bytes held by `row`."""
        return 0 if self.row is None else self.row.nbytes


@dataclass(frozen=True, eq=False)
class StateSnapshot:
    """The states of all recurrent layers behind some entries of a value."""

    at: int  # number of these entries
    pages: np.ndarray  # [M] int32 (`models.layer_groups.StatePages`); none for zeros, the states before the first token


ZEROS = StateSnapshot(0, np.zeros(0, np.int32))


def snapshot_before(snapshots: Iterable[StateSnapshot], length: int) -> StateSnapshot | None:
    """The last snapshot of at most `length` entries, or None."""
    return max((one for one in snapshots if one.at <= length), key=lambda one: one.at, default=None)


@dataclass(frozen=True)
class EntryTable:
    """A sequence of entries in the pages of a pool or of a file. It holds no references to them."""

    # [P, 3 + groups] int32 spans: START, STOP, POSITION, and a page id for each group of layers (`kv.spans`)
    table: np.ndarray
    tokens: np.ndarray  # [n] int32, the token of each entry
    stretches: tuple[Stretch, ...]  # provenance of the entries
    next_position: int  # the position of the next entry
    tail: Tail | None = None  # the start of the next stroke, if it is known
    # known states of recurrent layers, by rising number of entries; none for a model without such layers
    snapshots: tuple[StateSnapshot, ...] = ()
    # [n, layers with K and V, KV heads] int32, the position of each head's entry, where heads hold different ones
    # (`kv.entries_by_head`); None: all hold the same
    head_positions: np.ndarray | None = None
    # [n, layers with K and V, KV heads] float32, what is added to the scores of each head's entry; None: 0
    bias: np.ndarray | None = None

    @classmethod
    def empty(cls, groups: int, states: bool = False) -> EntryTable:
        """No entries, for a model with so many groups of layers, of which some may have `states`."""
        return cls(spans.empty(groups), np.zeros(0, np.int32), (), 0, None, (ZEROS,) if states else ())

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        before = sum(stretch.before.nbytes for stretch in self.stretches)
        tail = 0 if self.tail is None else self.tail.nbytes
        heads = sum(0 if one is None else one.nbytes for one in (self.head_positions, self.bias))
        return self.table.nbytes + self.tokens.nbytes + before + tail + heads

    def positions_by_head(self, layers: int, heads: int) -> np.ndarray:
        """[n, layers, heads] int32, read-only, also where all heads hold the same entries."""
        if self.head_positions is not None:
            return self.head_positions
        positions = spans.positions(self.table).astype(np.int32)
        return np.broadcast_to(positions[:, None, None], (len(self), layers, heads))

    def canonical_length(self, model: str) -> int:
        """Number of leading entries that `model` (an id) computed over exactly the tokens before each."""
        return canonical_length(self.stretches, self.tokens, model)

    def cut(self, start: int, stop: int) -> EntryTable:
        """The entries [start, stop), with unchanged positions. The tail stays if the last entry does."""
        table = spans.cut(self.table, start, stop)
        if stop == len(self):
            next_position = self.next_position
        elif stop > start:
            next_position = spans.end_position(table)
        else:
            next_position = int(spans.positions(self.table)[stop])
        tail = self.tail if stop == len(self) and stop > start else None
        stretches = cut(self.stretches, self.tokens, start, stop)
        inside = (one for one in self.snapshots if start <= one.at <= stop)
        snapshots = tuple(replace(one, at=one.at - start) for one in inside)
        if start == stop and self.snapshots:  # nothing was read
            snapshots = (ZEROS,)
        heads, bias = (None if one is None else one[start:stop] for one in (self.head_positions, self.bias))
        return EntryTable(table, self.tokens[start:stop], stretches, next_position, tail, snapshots, heads, bias)

    def require_before(self, other: EntryTable) -> None:
        """Raise KVError unless the positions of both increase where `other` follows."""
        last, first = spans.end_position(self.table) - 1, int(other.table[0, POSITION])
        if first <= last:
            raise KVError(f"positions must increase: the left value ends at {last} and the right one begins at {first}")

    def followed_by(self, other: EntryTable, seam: np.ndarray | None = None) -> EntryTable:
        """The entries of both. `seam`: a span in place of the last one here and the first one of `other`."""
        left, right = self.table, other.table
        if seam is not None:
            left, right = np.concatenate([left[:-1], seam[None]]), right[1:]
        return EntryTable(
            np.concatenate([left, right]),
            np.concatenate([self.tokens, other.tokens]),
            self.stretches + other.stretches,
            other.next_position,
            other.tail,
            tuple(replace(one, at=one.at + len(self)) for one in other.snapshots),
            joined_heads(self, other),
            joined_bias(self, other),
        )

    def in_pages(self, old: np.ndarray, new: np.ndarray) -> EntryTable:
        """The same entries in other pages: new[i] for old[i]. `old` holds each page of the table once."""
        snapshots = tuple(
            replace(one, pages=spans.renumbered(one.pages, old, new).astype(np.int32)) for one in self.snapshots
        )
        table = spans.with_pages(self.table, old, new).astype(np.int32, copy=False)
        return replace(self, table=table, snapshots=snapshots)

    def pages_and_stops(self, page_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Each page once, in order of first use, and the last slot of it that is used, plus one."""
        pages = spans.distinct_pages(self.table)
        stops = spans.slot_stops(self.table, pages)
        if not self.snapshots:
            return pages, stops
        whole = self.snapshot_pages
        return np.concatenate([pages, whole]), np.concatenate([stops, np.full(len(whole), page_size)])

    @property
    def last_snapshot(self) -> StateSnapshot | None:
        """The last snapshot of at most these entries, or None."""
        return snapshot_before(self.snapshots, len(self))

    @property
    def snapshot_pages(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *(one.pages for one in self.snapshots)])

    @property
    def pages(self) -> np.ndarray:
        """The pages of all spans and snapshots; a page may be there more than once."""
        held = spans.held_pages(self.table)
        return np.concatenate([held, self.snapshot_pages]) if self.snapshots else held


def joined_heads(left: EntryTable, right: EntryTable) -> np.ndarray | None:
    """`head_positions` of the entries of both."""
    known = left.head_positions if left.head_positions is not None else right.head_positions
    if known is None:
        return None
    return np.concatenate([one.positions_by_head(*known.shape[1:]) for one in (left, right)])


def joined_bias(left: EntryTable, right: EntryTable) -> np.ndarray | None:
    """`bias` of the entries of both."""
    known = left.bias if left.bias is not None else right.bias
    if known is None:
        return None
    shape = known.shape[1:]
    each = [np.zeros((len(one), *shape), np.float32) if one.bias is None else one.bias for one in (left, right)]
    return np.concatenate(each)
