"""The stores below one model's prefix index: their pages are found, read and written by keys.

What a store calls a page is a *block*: the pages of all groups of layers that hold the same tokens, one after another.
"""

import logging
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.pins import Pin
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.tiers.admission import Admission
from twostroke.kv.tiers.names import Namespace, PageName, chain, private_name
from twostroke.kv.tiers.store import Store
from twostroke.kv.tiers.tiers import Tiers
from twostroke.kv.write_back import WriteBack, WriteBackBlock

log = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20  # bytes that are read or written at once
TOUCHES = {"disk": 2, "remote": 1}
MAX_RUNS = 8


@dataclass(frozen=True)
class StoredRun:
    """Pages [start, stop) of a prompt, counted from the first one asked for, in one store."""

    store: Store
    start: int
    stop: int


class BackingStores:
    """The stores of one model. `find` and `read` are called from I/O threads.

    Attributes:
        namespace: what its pages have in common.
        group: number of pages that are read or written at once.
        write_back: what waits to be written.
        computing: predicted seconds to compute (context, count) tokens; the engine sets it once it has measured.
    """

    def __init__(self, tiers: Tiers, index: PrefixIndex, name: str) -> None:
        self.tiers, self.index, self.pool = tiers, index, index.pool
        pool, model = index.pool, index.model
        self.computing: Callable[[int, int], float] = lambda context, count: 0.0
        geometry, layout = pool.geometry.fingerprint, pool.memory.layout
        self.namespace = Namespace(name, model, geometry, layout, pool.page_size, pool.block_bytes)
        self.group = max(1, min(GROUP_BYTES // pool.block_bytes, pool.num_pages // pool.num_groups // 8))
        self.write_back = WriteBack(index)
        self._admissions = {store.tier: Admission(TOUCHES[store.tier]) for store in tiers.stores}

    def probe(self) -> None:
        """Measure each store with one page, so that the first load can be predicted. Failures leave the guesses."""
        data, back = secrets.token_bytes(self.pool.block_bytes), bytearray(self.pool.block_bytes)
        for store in self.tiers.stores:
            link, name = self.tiers.speeds[store.tier], private_name()
            try:
                store.find(self.namespace, [name])
                began = time.perf_counter()
                store.find(self.namespace, [name])
                link.latency_s = time.perf_counter() - began
                store.keep(self.namespace, name, memoryview(data))
                began = time.perf_counter()
                store.fetch(self.namespace, name, memoryview(back))
                link.bytes_per_s = len(back) / max(time.perf_counter() - began, 1e-5)
                store.discard(self.namespace, [name])
            except KVError as error:
                log.info("%s is not measured: %s", store.where, error)

    def worth_asking(self, context: int, count: int) -> bool:
        """Whether loading one page might be quicker than computing `count` tokens after `context` entries."""
        seconds, links = self.computing(context, count), self.tiers.speeds.values()
        worth = any(link.seconds(self.pool.block_bytes) < seconds for link in links if not link.closed)
        for link in () if worth else links:
            link.not_worthwhile()
        return worth

    def names(self, tokens: np.ndarray) -> list[PageName]:
        return chain(self.namespace, tokens)

    def find(self, names: Sequence[PageName], asking: Callable[[str], None]) -> list[StoredRun]:
        """Find the leading pages, each in the nearest store that has it. `asking` is called with each tier before."""
        segments: list[StoredRun] = []
        done = 0
        while done < len(names) and len(segments) < MAX_RUNS:
            for store in self.tiers.stores:
                link, admission = self.tiers.speeds[store.tier], self._admissions[store.tier]
                if link.closed:
                    store.counters.skipped("open", len(names) - done)
                    continue
                asking(store.tier)
                began = time.perf_counter()
                count = store.find(self.namespace, names[done:])
                link.answered(time.perf_counter() - began)
                store.counters.looked_up(count, len(names) - done - count)
                if count:
                    admission.found(names[done : done + count])
                    segments.append(StoredRun(store, done, done + count))
                    done += count
                    break
                admission.missing(names[done:])
            else:
                break
        return segments

    def read(self, store: Store, names: Sequence[PageName], limit_s: float) -> np.ndarray:
        """Read blocks into fresh frames.

        Returns the pages of the leading ones that are right, [n, groups], each with a reference for the caller. Raises
        OutOfPages.
        """
        pool, groups = self.pool, self.pool.num_groups
        pool.make_room(len(names) * groups)
        pages = np.array(pool.allocate(len(names) * groups), np.int64)
        pin = Pin(pages)
        link, bytes_asked, count = self.tiers.speeds[store.tier], len(pages) * pool.page_bytes, 0
        link.reserve(bytes_asked)
        try:
            pool.pins.add(pin)
            with ExitStack() as views, self._filling(pages, views) as into:
                began = time.perf_counter()
                count = store.read(self.namespace, names, into, limit_s)
                link.read(count * pool.block_bytes, time.perf_counter() - began)
        finally:
            pool.pins.remove(pin)
            link.reserve(-bytes_asked)
            pool.claim_fresh(pages[: count * groups], np.full(count * groups, pool.page_size))
            wrong = pages[count * groups :]
            for page in wrong.tolist():  # frames are used again, and must not hold NaN
                pool.put(page, bytes(pool.page_bytes), 0)
            if len(wrong):
                pool.release(wrong)
        if count < len(names):
            self._admissions[store.tier].missing(names[count:])
        return pages[: count * groups].reshape(-1, groups)

    @contextmanager
    def _filling(self, pages: np.ndarray, views: ExitStack) -> Generator[list[memoryview]]:
        """Writable bytes of blocks, whose pages are the given ones in turn: those of the pages, if blocks have one."""
        frames, size = self.pool.frames_of(pages).tolist(), self.pool.page_bytes
        fills = [views.enter_context(self.pool.memory.filling(frame)) for frame in frames]
        if self.pool.num_groups == 1:
            yield fills
            return
        blocks = [memoryview(bytearray(self.pool.block_bytes)) for _ in range(0, len(pages), self.pool.num_groups)]
        yield blocks
        parts = (block[at : at + size] for block in blocks for at in range(0, len(block), size))
        for fill, part in zip(fills, parts, strict=True):
            fill[:] = part

    def insert(self, kv: KVCache, start: int, again: bool = False) -> None:
        """Index a value's canonical pages, count a use of them from page `start` on, and queue those that are admitted.

        `again`: they will soon be asked for again. Returns at once. What waits to be written holds no page.
        """
        with self.pool.lock:  # no page may leave the index in between
            pages = self.index.insert(kv)
            if len(pages) <= start and not again:
                return
            offered = self.write_back.enqueue(pages)
        tokens = kv.token_array[: len(pages) * self.pool.page_size]
        self.tiers.note(partial(self._admit, tokens, offered, start, again))

    def _admit(self, tokens: np.ndarray, offered: list[WriteBackBlock], start: int, again: bool) -> None:
        names, seconds = self.names(tokens), self.computing(0, len(tokens))
        for store in self.tiers.stores:
            tier, admission = store.tier, self._admissions[store.tier]
            outbox, quicker = self.tiers.write_queues[tier], self._load_seconds(tier, len(names)) < seconds
            at_once = TOUCHES[tier] == 1 or seconds >= self.tiers.first_touch_s or (again and quicker)
            first, stop = admission.touch(names, start, at_once)
            store.counters.skipped("second_touch", max(0, len(names) - max(stop, start)))
            if first:
                outbox.run(partial(store.touch, self.namespace, names[:first]))
            for at in range(first, stop, self.group):
                end = min(at + self.group, stop)
                outbox.push(QueuedWrite(self, store, names[at:end], offered[at:end], admission))

    def _load_seconds(self, tier: str, pages: int) -> float:
        """Predicted seconds to load pages."""
        return self.tiers.speeds[tier].seconds(pages * self.pool.block_bytes)


class QueuedWrite:
    """Some consecutive pages of a prompt that wait to be written to a store."""

    def __init__(
        self,
        lower: BackingStores,
        store: Store,
        names: list[PageName],
        offered: list[WriteBackBlock],
        admission: Admission,
    ) -> None:
        self._stores, self._store, self._names, self._admission = lower, store, names, admission
        self._offered = offered
        self._written = 0
        self.pages = len(names)
        self.size = self.pages * lower.pool.block_bytes

    def write(self) -> None:
        """Write copies: a store that hangs keeps no frame, and no index waits for it."""
        copies = self._stores.write_back.read(self._offered)
        self._store.counters.skipped("queue", self.pages - len(copies))
        if copies:
            self._written = self._store.write(self._stores.namespace, self._names[: len(copies)], copies)

    def drop(self) -> None:
        self._offered = []
        self._admission.missing(self._names[self._written :])
