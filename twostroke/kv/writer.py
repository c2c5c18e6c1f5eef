"""The growing end of a value: where a stroke enters tokens before the result is frozen into a new value."""

from dataclasses import dataclass

import numpy as np

from twostroke.backends.interface import PAGE, START, STOP
from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.contents import Tail
from twostroke.kv.pages import POOL
from twostroke.kv.provenance import extend


@dataclass(frozen=True)
class Places:
    """Where newly entered tokens go: `rows` are positions, frames of the pool's memory and slots, [3, n] int64."""

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


class Writer:
    """Extends one value, which stays as it is. While the writer is open, all pages that it holds stay in the pool.

    The value's last page is written in place where nobody wrote behind its last entry yet, and copied otherwise
    (copy on write): two continuations of one value share everything but what differs.
    """

    def __init__(self, base: KVCache, model: str) -> None:
        """Bring the value's pages into the pool, where one is elsewhere.

        Args:
            base: what to extend.
            model: id of the weights that will compute the entries.

        Raises:
            OutOfPages: no room for its pages.
        """
        base = base.to(POOL)
        self.base, self.model = base, model
        self.next_position = base.next_position
        self._table = np.concatenate([base.table, np.zeros((8, 4), np.int32)])
        self._num_spans = len(base.table)
        self._tokens: list[int] = []
        self._closed = False
        self._own: list[int] = []  # pages allocated here: one reference each, given back by close
        base.pool.fetch(base.table[:, PAGE])
        base.pool.writers.add(self)

    def __len__(self) -> int:
        return len(self.base) + len(self._tokens)

    def __del__(self) -> None:
        self.close()

    @property
    def table(self) -> np.ndarray:
        """[P, 4] spans of all entries so far."""
        return self._table[: self._num_spans]

    def append(self, tokens: list[int]) -> Places:
        """Make room for `tokens` at the next positions.

        Raises OutOfPages with nothing changed. K and V at the returned places are the caller's to write.
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
        if copy:
            copied, page = page, pages.pop(0)
            pool.copy_page(copied, page, stop)
            pool.claim(page, stop, stop + in_place)
        if in_place:
            self._table[self._num_spans - 1] = page, start, stop + in_place, position
        first = self.next_position
        self.next_position += count
        self._tokens += tokens
        if in_place == count == 1:  # as at every step of a decode: an array costs more than the rest of this
            return Places(np.array([[first], [pool.frame(page)], [stop]], np.int64))
        self._add_spans(pages, count - in_place, first + in_place)
        # What does not begin behind the last entry begins a page.
        order = np.arange(count) + (stop if in_place else 0)
        frames = [pool.frame(id) for id in ([page, *pages] if in_place else pages)]
        where = np.array(frames, np.int64)[order // size]
        return Places(np.stack([np.arange(first, first + count), where, order % size]))

    def _add_spans(self, pages: list[int], count: int, position: int) -> None:
        size = self.base.pool.page_size
        while self._num_spans + len(pages) > len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        for i, page in enumerate(pages):
            stop = min(size, count - i * size)
            self.base.pool.claim(page, 0, stop)
            self._table[self._num_spans + i] = page, 0, stop, position + i * size
        self._num_spans += len(pages)

    def truncate(self, length: int) -> None:
        """Take back what was entered here past `length` entries and is frozen in no value."""
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
        return KVCache(
            base.pool,
            self.table.copy(),
            np.concatenate([base.token_array, np.array(self._tokens, np.int32)]),
            extend(base.stretches, base.token_array, base.next_position, self.model, len(self._tokens)),
            self.next_position,
            tail,
        )

    def close(self) -> None:
        """Give back what no frozen value holds. Nothing can be entered or frozen after this."""
        self._closed = True
        if hasattr(self, "base"):  # not when __init__ failed
            self.base.pool.writers.discard(self)
        if getattr(self, "_own", None):
            self.base.pool.release(np.array(self._own))
            self._own = []

    def _require_open(self) -> None:
        if self._closed:  # its pages may be somebody else's by now
            raise KVError("this writer is closed: open another one on the value it began with")
