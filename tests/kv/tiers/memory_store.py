"""A store in this process's memory that can be slow, hang, lie and lose."""

import threading
import time
from collections.abc import Callable, Sequence

from twostroke.errors import OutOfPages, PageLost
from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.names import Namespace, PageName

Pages = dict[tuple[bytes, bytes], bytes]


class MemoryStore:
    """Keeps pages in `pages`, which several stores may share, as processes share a directory.

    Attributes:
        before: called with the name of each method before it does anything; it may sleep, wait, raise, or drop pages.
        share: reads return at most this share of the pages that were asked for.
        loses: whether pages may be gone that were written.
    """

    def __init__(self, tier: str = "disk", pages: Pages | None = None) -> None:
        self.tier, self.where, self.counters = tier, f"memory:{tier}", TierCounters()
        self.pages: Pages = {} if pages is None else pages
        self.private: dict[bytes, bytes] = {}
        self.before: Callable[[str], object] = lambda _: None
        self.share = 1.0
        self.threads: set[str] = set()
        self.most_bytes, self.loses = 1 << 40, False
        self.answering = True

    @property
    def used_bytes(self) -> int:
        return sum(map(len, [*self.pages.values(), *self.private.values()]))

    def find(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        self._enter("find")
        return self._count(namespace, names)

    def find_any(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        self._enter("find")
        return next((i for i, name in enumerate(names) if (namespace.digest, name.key) in self.pages), len(names))

    def _count(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        missing = (i for i, name in enumerate(names) if (namespace.digest, name.key) not in self.pages)
        return next(missing, len(names))

    def read(self, namespace: Namespace, names: Sequence[PageName], into: Sequence[memoryview], limit_s: float) -> int:
        began = time.perf_counter()
        for view in into:
            view[:] = b"\xff" * len(view)  # NaN: nobody may use what is not counted
        self._enter("read")
        count = 0
        for name, view in zip(names, into, strict=True):
            page = self.pages.get((namespace.digest, name.key))
            if page is None or count >= self.share * len(names):
                break
            view[:] = page
            count += 1
        self.counters.moved("in", count, count * namespace.page_bytes, time.perf_counter() - began)
        return count

    def write(self, namespace: Namespace, names: Sequence[PageName], pages: Sequence[memoryview]) -> int:
        self._enter("write")
        for name, page in zip(names, pages, strict=True):
            assert name.right
            assert len(page) == namespace.page_bytes
            if name.number and (namespace.digest, name.parent) not in self.pages:
                assert self.loses, "a page without its parent"
                break
            if len(self.pages) * namespace.page_bytes >= self.most_bytes:
                self.counters.skipped("full")
                break
            known = self.pages.setdefault((namespace.digest, name.key), bytes(page))
            assert known == bytes(page), "two contents of one key"
            self.counters.moved("out", 1, len(page), 0.0)
        return self._count(namespace, names)

    def touch(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        self._enter("touch")

    def keep(self, namespace: Namespace, name: PageName, page: memoryview) -> None:
        self._enter("keep")
        if len(self.private) >= 1 << 20:
            raise OutOfPages("full")
        self.private[name.key] = bytes(page)

    def fetch(self, namespace: Namespace, name: PageName, into: memoryview) -> None:
        self._enter("fetch")
        if name.key not in self.private:
            raise PageLost(f"a page of a value is gone from {self.where}: compute the value again")
        into[:] = self.private[name.key]

    def discard(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        self._enter("discard")
        for name in names:
            self.private.pop(name.key, None)

    def close(self) -> None:
        self.private.clear()

    def _enter(self, what: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.before(what)
