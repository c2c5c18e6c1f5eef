"""A writer extends a value: a stroke enters tokens, then freezes the result into a new value."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable, Tail
from twostroke.kv.pages import POOL
from twostroke.kv.provenance import extend
from twostroke.kv.tier_moves import fetch


@dataclass(frozen=True)
class SlotMapping:
    """The positions, frames and slots where K and V of newly entered tokens belong.

    Attributes:
        rows: [3, n] int64: positions, frames of the pool's memory, and slots.
    """

    rows: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        return self.rows[0]

    @property
    def frames(self) -> np.ndarray:
        return self.rows[1]

    @property
    def slots(self) -> np.ndarray:
        return self.rows[2]


class KVWriter:
    """Extends one value, which does not change. While the writer is open, all its pages stay in the pool.

    The value's last page is written in place if the slots after its last entry are unclaimed, and copied otherwise
    (copy on write). So two continuations of one value share all other pages.
    """

    def __init__(self, base: KVCache, model: str) -> None:
        """Bring the value's pages into the pool if some are not there.

        Args:
            base: the value to extend.
            model: id of the model that will compute the entries.

        Raises:
            OutOfPages: no room for its pages. PageLost: its pages are gone or damaged where they were.
        """
        base = base.to(POOL)
        self.base, self.model = base, model
        self._base_length = len(base)
        self.next_position = base.next_position
        self._table = np.concatenate([base.table, np.zeros((8, 4), np.int32)])
        self._num_spans = len(base.table)
        self._tokens: list[int] = []
        self._closed = False
        self._own: list[int] = []  # pages allocated here, one reference each, released by close
        base.pool.pins.add(self)  # first: nothing may spill them in between
        try:
            fetch(base.pool, base.table[:, PAGE])
        except BaseException:
            base.pool.pins.remove(self)
            raise

    def __len__(self) -> int:
        return self._base_length + len(self._tokens)

    def __del__(self) -> None:
        self._close(lambda pages: self.base.pool.drop(pages, POOL))

    @property
    def table(self) -> np.ndarray:
        """[P, 4] int32 spans of all entries so far."""
        return self._table[: self._num_spans]

    @property
    def has_slot(self) -> bool:
        """Whether the next entry needs no new page."""
        if not self._num_spans:
            return False
        pool = self.base.pool
        page, start, stop, position = self._table[self._num_spans - 1].tolist()
        in_place = position + stop - start == self.next_position and stop < pool.page_size
        if not in_place or not pool.claim(page, stop, stop + 1):
            return False
        pool.unclaim(page, stop)
        return True

    def append(self, tokens: list[int]) -> SlotMapping:
        """Allocate slots for `tokens` at the next positions.

        On OutOfPages nothing has changed. The caller must write K and V at the returned places.
        """
        self._require_open()
        pool, size, count, in_place = self.base.pool, self.base.pool.page_size, len(tokens), 0
        page = start = stop = position = 0
        if self._num_spans:
            page, start, stop, position = self._table[self._num_spans - 1].tolist()
            if position + stop - start == self.next_position:
                in_place = min(count, size - stop)
        claimed = in_place > 0 and pool.claim(page, stop, stop + in_place)
        copy = in_place > 0 and not claimed
        fresh = -(-(count - in_place) // size)
        try:
            pages = pool.allocate(fresh + copy)
        except Exception:
            if claimed:
                pool.unclaim(page, stop)
            raise
        self._own += pages
        if pool.wipes:
            for id in pages:
                pool.put(id, bytes(pool.page_bytes), 0)
        if copy:
            copied, page = page, pages.pop(0)
            pool.copy_page(copied, page, stop)
            pool.claim(page, stop, stop + in_place)
            self._table[self._num_spans - 1, PAGE] = page
        if in_place:
            self._table[self._num_spans - 1, STOP] = stop + in_place
        first = self.next_position
        self.next_position += count
        self._tokens += tokens
        if pages:
            self._add_spans(pages, count - in_place, first + in_place)
        if count == 1:  # fast path of decoding: array operations cost more than the rest of this
            where, slot = (page, stop) if in_place else (pages[0], 0)
            return SlotMapping(np.array([[first], [pool.frame(where)], [slot]], np.int64))
        # Tokens that do not continue the last page begin a new one.
        order = np.arange(count) + (stop if in_place else 0)
        frames = pool.frames_of([page, *pages] if in_place else pages)[order // size]
        return SlotMapping(np.stack([np.arange(first, first + count), frames, order % size]))

    def _add_spans(self, pages: list[int], count: int, position: int) -> None:
        size = self.base.pool.page_size
        while self._num_spans + len(pages) > len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        if len(pages) == 1:  # as for most decodes
            self._table[self._num_spans] = pages[0], 0, count, position
            self.base.pool.claim(pages[0], 0, count)
            self._num_spans += 1
            return
        first = np.arange(len(pages)) * size
        spans = self._table[self._num_spans : self._num_spans + len(pages)]
        spans[:, PAGE], spans[:, START], spans[:, POSITION] = pages, 0, position + first
        spans[:, STOP] = np.minimum(size, count - first)
        self.base.pool.claim_fresh(pages, spans[:, STOP])
        self._num_spans += len(pages)

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
            self.base.pool.unclaim(int(last[PAGE]), int(last[STOP]))
            if last[STOP] == last[START]:
                self._num_spans -= 1
                self._own.remove(int(last[PAGE]))
                self.base.pool.release(last[PAGE : PAGE + 1])

    def freeze(self, tail: Tail | None = None) -> KVCache:
        """The value of all entries so far."""
        self._require_open()
        base = self.base
        tokens = np.concatenate([base.token_array, np.fromiter(self._tokens, np.int32, len(self._tokens))])
        stretches = extend(base.stretches, base.token_array, base.next_position, self.model, len(self._tokens))
        return KVCache(base.pool, EntryTable(self.table.copy(), tokens, stretches, self.next_position, tail))

    def close(self) -> None:
        """Release pages that no frozen value holds. Nothing can be entered or frozen after this."""
        self._close(self.base.pool.release)

    def _close(self, release: Callable[[np.ndarray], object]) -> None:
        self._closed = True
        if hasattr(self, "base"):  # not set if __init__ failed
            self.base.pool.pins.remove(self)
        if own := getattr(self, "_own", None):
            self._own = []
            release(np.array(own))

    def _require_open(self) -> None:
        if self._closed:  # its pages may have been reused
            raise KVError("this writer is closed: open another one on its base value")
