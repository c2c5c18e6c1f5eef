"""A writer extends a value: a stroke enters tokens, then freezes the result into a new value."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP, StateStep
from twostroke.errors import KVError, OutOfPages
from twostroke.kv import spans
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable, StateSnapshot, Tail, joined_bias, joined_heads
from twostroke.kv.open_windows import OpenWindow, window_kinds
from twostroke.kv.pages import POOL
from twostroke.kv.provenance import extend
from twostroke.kv.slot_mapping import SlotMapping
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.states import OpenStates, needed_snapshots
from twostroke.kv.tier_moves import fetch


class KVWriter:
    """Extends one value, which does not change. While the writer is open, all its pages stay in the pool.

    The value's last pages are written in place if the slots after its last entry are unclaimed, and copied otherwise
    (copy on write). So two continuations of one value share all other pages. Windowed groups of layers give back the
    pages that no further entry attends to.
    """

    def __init__(self, base: KVCache, model: str, lookback: int = 1, guesses: int = 0, parting: int = 0) -> None:
        """Bring the value's pages into the pool if some are not there.

        Args:
            base: the value to extend.
            model: id of the model that will compute the entries.
            lookback: number of last entries whose attention may be computed again, at least 1: a value has what they
                attend to.
            guesses: number of further entries that may be removed again.
            parting: a multiple of the chunk after which other values of the same beginning go on; 0: none is known. A
                snapshot of states there is kept until `close`, as long as there is room.

        Raises:
            OutOfPages: no room for its pages. PageLost: its pages are gone or damaged where they were. KVError: it
                lacks entries of windowed layers.
        """
        if not base.complete:
            raise KVError(
                "this value lacks entries or states that its next token reads, since layers have given them back: hold "
                "the value before the cut, or compute it again"
            )
        base = base.to(POOL)
        self.base, self.model = base, model
        by_entry = base.entry_table.bias
        # What is added to scores of the base's entries, [layers, KV heads, n] float32.
        self.bias = None if by_entry is None else np.ascontiguousarray(by_entry.transpose(1, 2, 0))
        self._base_length, self.next_position = len(base), base.next_position
        self._table = np.concatenate([base.table, np.zeros((8, base.table.shape[1]), np.int32)])
        self._num_spans, self._closed = len(base.table), False
        self._tokens: list[int] = []
        self.own_pages: dict[int, None] = {}  # pages allocated here, one reference each, released by close
        self._windows = [OpenWindow(base.pool, window, kind) for window, kind in window_kinds(base.pool)]
        self._lookback, self._guesses = lookback, guesses
        self._states: OpenStates | None = None
        if base.pool.geometry.states:
            self._states = OpenStates(base.pool, base.entry_table.snapshots, len(base) - (lookback - 1), parting)
        base.pool.pins.add(self)  # first: nothing may spill them in between
        try:
            fetch(base.pool, self.pages)
        except BaseException:
            base.pool.pins.remove(self)
            raise

    def __len__(self) -> int:
        return self._base_length + len(self._tokens)

    def __del__(self) -> None:
        self._close(lambda pages: self.base.pool.drop(pages, POOL))

    @property
    def table(self) -> np.ndarray:
        """[P, 3 + groups] int32 spans of all entries so far."""
        return self._table[: self._num_spans]

    @property
    def pages(self) -> np.ndarray:
        """The pages of all entries so far, and of states; a page may be there more than once."""
        held = spans.held_pages(self.table)
        return held if self._states is None else np.concatenate([held, np.array(self._states.pages, np.int64)])

    @property
    def has_slot(self) -> bool:
        """Whether the next entry needs no new page."""
        if not self._num_spans:
            return False
        pool = self.base.pool
        start, stop, position, *pages = self._table[self._num_spans - 1].tolist()
        in_place = position + stop - start == self.next_position and stop < pool.page_size
        closes = self._states is not None and (self.next_position + 1) % pool.geometry.chunk == 0
        if not in_place or closes or NO_PAGE in pages or not pool.claim_all(pages, stop, stop + 1):
            return False
        pool.unclaim(pages, stop)
        return True

    @property
    def leaves_pages(self) -> bool:
        """Whether the next `append` gives back pages that are behind a window."""
        return any(one.passed(self.table, self._first_query) > one.first for one in self._windows)

    @property
    def _first_query(self) -> int:
        """The first position whose attention may be computed from now on."""
        return self.next_position - self._lookback - self._guesses

    def append(self, tokens: list[int]) -> SlotMapping:
        """Allocate slots for `tokens` at the next positions, and pages for the states that they reach.

        On OutOfPages no slot is taken. The caller must write entries and states at the returned places.
        """
        self._require_open()
        if self._windows:
            self._release_passed()
        pool, size, count, in_place = self.base.pool, self.base.pool.page_size, len(tokens), 0
        start = stop = position = 0
        last: list[int] = []
        if self._num_spans:
            start, stop, position, *last = self._table[self._num_spans - 1].tolist()
            if position + stop - start == self.next_position and NO_PAGE not in last:
                in_place = min(count, size - stop)
        claimed = in_place > 0 and pool.claim_all(last, stop, stop + in_place)
        copied = in_place > 0 and not claimed
        try:
            try:
                copies, pages, states = self._allocate(copied, count, in_place)
            except OutOfPages:
                if self._states is None or not self._states.parting:
                    raise
                self._states.parting = 0
                self._release_own(self._states.forget_before(self._first_query))
                copies, pages, states = self._allocate(copied, count, in_place)
        except Exception:
            if claimed:
                pool.unclaim(last, stop)
            raise
        if copied:
            for source, page in zip(last, copies, strict=True):
                pool.copy_page(source, page, stop)
            last = copies
            pool.claim_all(last, stop, stop + in_place)
            self._table[self._num_spans - 1, PAGE:] = last
        if in_place:
            self._table[self._num_spans - 1, STOP] = stop + in_place
        first = self.next_position
        self.next_position += count
        self._tokens += tokens
        if pages:
            self._add_spans(pages, count - in_place, first + in_place)
        held = [*last, *pages] if in_place else pages
        return SlotMapping.of(pool, held, first, stop if in_place else 0, count, states)

    def _allocate(self, copied: bool, count: int, in_place: int) -> tuple[list[int], list[int], StateStep | None]:
        """Pages for copies of the last ones, for new spans, and for snapshots. On OutOfPages none is taken."""
        pool, size, groups = self.base.pool, self.base.pool.page_size, self.base.pool.num_groups
        fresh, states = -(-(count - in_place) // size), self._states
        if states is None:
            if not (fresh or copied):  # as for most tokens of a decode
                return [], [], None
            pages = self._take((fresh + copied) * groups)
            return pages[: copied * groups], pages[copied * groups :], None
        position, last = self.next_position, self.next_position + count
        first_query = last - self._lookback - self._guesses
        boundaries = states.boundaries(position, count, first_query)
        if not (fresh or copied or boundaries):  # as for most tokens of a decode
            return [], [], states.step(len(self), position, (), ())
        snapshots = states.allocate(boundaries)
        try:
            ends = np.minimum(position + in_place + size * np.arange(1, fresh + 1), last) - 1
            kept = np.ones((copied + fresh, groups), bool)
            for window in self._windows:
                if window.kind != "kv":
                    kept[copied:, window.groups] = (ends > window.limit(first_query))[:, None]
            taken = self._take(int(kept.sum()), np.nonzero(kept)[1])
        except BaseException:
            pool.release(np.array(snapshots, np.int64))
            raise
        self.own_pages.update(dict.fromkeys(snapshots))
        pages = np.full(kept.shape, NO_PAGE)
        pages[kept] = taken
        every: list[int] = pages.ravel().tolist()
        step = states.step(len(self), position, boundaries, snapshots)
        return every[: copied * groups], every[copied * groups :], step

    def _take(self, count: int, groups: np.ndarray | None = None) -> list[int]:
        """Fresh pages, with references that `close` releases."""
        pool = self.base.pool
        pages = pool.allocate(count, groups)
        self.own_pages.update(dict.fromkeys(pages))
        if pool.wipes:
            for id in pages:
                pool.put(id, bytes(pool.page_bytes), 0)
        return pages

    def _add_spans(self, pages: list[int], count: int, position: int) -> None:
        pool, size = self.base.pool, self.base.pool.page_size
        added = len(pages) // pool.num_groups
        while self._num_spans + added > len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        if added == 1 and NO_PAGE not in pages:  # as for most decodes
            self._table[self._num_spans] = 0, count, position, *pages
            pool.claim_all(pages, 0, count)
            self._num_spans += 1
            return
        first = np.arange(added) * size
        new = self._table[self._num_spans : self._num_spans + added]
        new[:, START], new[:, POSITION] = 0, position + first
        new[:, STOP] = np.minimum(size, count - first)
        new[:, PAGE:] = np.reshape(pages, (added, -1))
        held = new[:, PAGE:] != NO_PAGE
        pool.claim_fresh(new[:, PAGE:][held], np.broadcast_to(new[:, STOP, None], held.shape)[held])
        self._num_spans += added

    def _release_passed(self) -> None:
        """Give back the pages of windowed groups that no further entry attends to."""
        for window in self._windows:
            passed = window.passed(self.table, self._first_query)
            if passed == window.first:
                continue
            pages = self._table[window.first : passed, window.columns].ravel().tolist()
            self._table[window.first : passed, window.columns] = NO_PAGE
            window.first = passed
            self._release_own(pages)
        if self._states is not None:
            self._release_own(self._states.forget_before(self._first_query))

    def _release_own(self, pages: list[int]) -> None:
        """Release those of these pages that are not the base's."""
        own = [page for page in pages if page in self.own_pages]
        for page in own:
            del self.own_pages[page]
        self.base.pool.release(np.array(own, np.int64))

    def set_last_token(self, token: int) -> None:
        """Set the last entry's token, which was not known when it was entered."""
        self._tokens[-1] = token

    def truncate(self, length: int) -> None:
        """Remove entries past `length`. They must have been entered here and not frozen in a value."""
        self._require_open()
        excess = len(self) - max(length, len(self.base))
        if excess <= 0:
            return
        del self._tokens[-excess:]
        self.next_position -= excess
        while excess:
            last = self._table[self._num_spans - 1]
            taken = min(excess, int(last[STOP] - last[START]))
            last[STOP] -= taken
            excess -= taken
            pages = last[PAGE:][last[PAGE:] != NO_PAGE].tolist()
            self.base.pool.unclaim(pages, int(last[STOP]))
            if last[STOP] == last[START]:
                self._num_spans -= 1
                self._release_own(pages)
        if self._states is not None:
            self._release_own(self._states.truncate(len(self)))

    def freeze(self, tail: Tail | None = None, whole: bool = False) -> KVCache:
        """The value of all entries so far, of windowed layers those still needed, or with `whole` those they have."""
        self._require_open()
        base, table = self.base, self.table.copy()
        for window in () if whole else self._windows:
            table[: window.passed(table, self.next_position - self._lookback), window.columns] = NO_PAGE
        snapshots: Sequence[StateSnapshot] = ()
        if self._states is not None:
            kept = self._states.snapshots
            snapshots = kept if whole else needed_snapshots(kept, max(0, len(self) - self._lookback))
        tokens = np.concatenate([base.token_array, np.fromiter(self._tokens, np.int32, len(self._tokens))])
        stretches = extend(base.stretches, base.token_array, base.next_position, self.model, len(self._tokens))
        made = EntryTable(table, tokens, stretches, self.next_position, tail, tuple(snapshots))
        if base.entry_table.head_positions is not None or base.entry_table.bias is not None:
            old, new = base.entry_table, made.cut(self._base_length, len(made))
            made = replace(made, head_positions=joined_heads(old, new), bias=joined_bias(old, new))
        return KVCache(base.pool, made)

    def close(self) -> None:
        """Release pages that no frozen value holds. Nothing can be entered or frozen after this."""
        self._close(self.base.pool.release)

    def _close(self, release: Callable[[np.ndarray], object]) -> None:
        self._closed = True
        if hasattr(self, "base"):  # not set if __init__ failed
            self.base.pool.pins.remove(self)
        if own := getattr(self, "own_pages", None):
            self.own_pages = {}
            release(np.fromiter(own, np.int64, len(own)))

    def _require_open(self) -> None:
        if self._closed:  # its pages may have been reused
            raise KVError("this writer is closed: open another one on its base value")
