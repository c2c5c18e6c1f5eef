"""Which pages go into a store: those seen before, so that prompts that come once wear no disk."""

import threading
from collections.abc import Sequence

from twostroke.kv.tiers.names import PageName

MAX_KEYS = 1 << 16  # remembered; the least recently used are forgotten
THERE = 1 << 30  # count of a page that is in the store, or waits to be written
ADMITTED = 2


class Admission:
    """Counts how often pages were used. `touches` of them admit a page."""

    def __init__(self, touches: int, most: int = MAX_KEYS) -> None:
        self._touches, self._most = touches, most
        self._counts: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def touch(self, names: Sequence[PageName], start: int, at_once: bool) -> tuple[int, int]:
        """Count a use of the pages from `start` on.

        Returns (first, stop): pages [first, stop) are to be written now, after `written` has not been told of them; all
        before are there. A page is admitted only with all before it. `at_once` admits without counting.
        """
        with self._lock:
            stop = len(names)
            first = None
            for i, name in enumerate(names):
                count = self._counts.pop(name.key, 0)
                if count < THERE:
                    count += i >= start
                    if stop == len(names) and not at_once and count < self._touches:
                        stop = i
                    if first is None:
                        first = i
                self._counts[name.key] = count
            first = stop if first is None else min(first, stop)
            for name in names[first:stop]:
                self._counts[name.key] = THERE
            self._forget()
            return first, stop

    def holds(self, name: PageName) -> bool:
        """Whether a page is in the store, or waits to be written, as far as is known."""
        with self._lock:
            return self._counts.get(name.key, 0) >= THERE

    def found(self, names: Sequence[PageName]) -> None:
        """Note that pages are in the store: they need not be written."""
        with self._lock:
            for name in names:
                self._counts.pop(name.key, None)
                self._counts[name.key] = THERE
            self._forget()

    def missing(self, names: Sequence[PageName]) -> None:
        """Note that pages are not in the store after all: they are written when they are used again."""
        with self._lock:
            for name in names:
                if self._counts.get(name.key, 0) >= THERE:
                    self._counts[name.key] = ADMITTED

    def _forget(self) -> None:
        while len(self._counts) > self._most:
            del self._counts[next(iter(self._counts))]
