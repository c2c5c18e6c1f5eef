"""What lies below one model's prefix index: pages in stores, found, read and written by their keys."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv.moves import Pin
from twostroke.kv.prefix import PrefixIndex
from twostroke.tiers.admission import Admission
from twostroke.tiers.names import Namespace, PageName, chain, private_name
from twostroke.tiers.store import Store
from twostroke.tiers.tiers import Tiers

log = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20  # bytes that are read or written at once
LOCKED_BYTES = 1 << 20  # bytes that are copied while the pool's lock is held
TOUCHES = {"disk": 2, "remote": 1}
MOST_SEGMENTS = 8


@dataclass(frozen=True)
class Segment:
    """Pages [start, stop) of a prompt, counted from the first one asked for, in one store."""

    store: Store
    start: int
    stop: int


class Lower:
    """The stores of one model. Methods other than `offer` are called from I/O threads.

    Attributes:
        namespace: what its pages have in common.
        group: number of pages that are read or written at once.
        computing: predicted seconds to compute (context, count) tokens; the engine sets it once it has measured.
    """

    def __init__(self, tiers: Tiers, index: PrefixIndex, name: str) -> None:
        self.tiers, self.index, self.pool = tiers, index, index.pool
        pool, model = index.pool, index.model
        self.computing: Callable[[int, int], float] = lambda context, count: 0.0
        geometry, layout = pool.geometry.fingerprint, pool.memory.layout
        self.namespace = Namespace(name, model, geometry, layout, pool.page_size, pool.page_bytes)
        self.group = max(1, min(GROUP_BYTES // pool.page_bytes, pool.num_pages // 8))
        self._admissions = {store.tier: Admission(TOUCHES.get(store.tier, 1)) for store in tiers.stores}

    def probe(self) -> None:
        """Measure each store with one page, so that the first load can be predicted. Failures leave the guesses."""
        data, back = secrets.token_bytes(self.pool.page_bytes), bytearray(self.pool.page_bytes)
        for store in self.tiers.stores:
            link, name = self.tiers.links[store.tier], private_name()
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
        one = min((link.seconds(self.pool.page_bytes) for link in self.tiers.links.values()), default=float("inf"))
        return self.computing(context, count) > one

    def names(self, tokens: np.ndarray) -> list[PageName]:
        return chain(self.namespace, tokens)

    def find(self, names: Sequence[PageName]) -> list[Segment]:
        """Where the leading pages are, each in the nearest store that has it."""
        segments: list[Segment] = []
        done = 0
        while done < len(names) and len(segments) < MOST_SEGMENTS:
            for store in self.tiers.stores:
                began = time.perf_counter()
                count = store.find(self.namespace, names[done:])
                self.tiers.links[store.tier].answered(time.perf_counter() - began)
                store.traffic.looked_up(count, len(names) - done - count)
                if count:
                    segments.append(Segment(store, done, done + count))
                    done += count
                    break
                self._admissions[store.tier].missing(names[done:])
            else:
                break
        return segments

    def read(self, store: Store, names: Sequence[PageName], limit_s: float) -> list[int]:
        """Read pages into fresh frames. Returns the leading ones that are right, each with a reference for the caller.

        Raises OutOfPages.
        """
        pool, size = self.pool, self.pool.page_size
        pages = pool.allocate(len(names))
        pin = Pin(spans.of_pages(np.array(pages, np.int64)))
        link, bytes_asked, count = self.tiers.links[store.tier], len(pages) * pool.page_bytes, 0
        link.reserve(bytes_asked)
        try:
            pool.pin(pin)
            with ExitStack() as views:
                into = [views.enter_context(pool.memory.filling(pool.frame(page))) for page in pages]
                began = time.perf_counter()
                count = store.read(self.namespace, names, into, limit_s)
                link.moved(count * pool.page_bytes, time.perf_counter() - began)
        finally:
            pool.unpin(pin)
            link.reserve(-bytes_asked)
            for page in pages[:count]:
                pool.claim(page, 0, size)
            wrong = pages[count:]
            for page in wrong:  # frames are used again, and must not hold NaN
                pool.put(page, bytes(pool.page_bytes), 0)
            if wrong:
                pool.release(np.array(wrong))
        if count < len(names):
            self._admissions[store.tier].missing(names[count:])
        return pages[:count]

    def offer(self, tokens: np.ndarray, start: int) -> None:
        """Count a use of a prompt's indexed pages from page `start` on, and queue those that are admitted.

        `tokens` is [n] int32 from position 0. Returns at once. What waits to be written holds no page.
        """
        self.tiers.note(partial(self._consider, tokens, start))

    def _consider(self, tokens: np.ndarray, start: int) -> None:
        size, names = self.pool.page_size, self.names(tokens)
        count, seconds = len(names), self.computing(0, len(tokens))
        for store in self.tiers.stores:
            admission = self._admissions[store.tier]
            at_once = TOUCHES.get(store.tier, 1) == 1 or seconds >= self.tiers.first_touch_s
            first, stop = admission.touch(names, start, at_once)
            store.traffic.skipped("second_touch", max(0, count - max(stop, start)))
            if first:
                self.tiers.submit(partial(store.touch, self.namespace, names[:first]))
            for at in range(first, stop, self.group):
                end = min(at + self.group, stop)
                parcel = Pages(self, store, names[at:end], tokens[: end * size], admission)
                self.tiers.outboxes[store.tier].put(parcel)


class Pages:
    """Some pages of a prompt that wait to be written to a store: the last `len(names)` of `tokens`."""

    def __init__(
        self, lower: Lower, store: Store, names: list[PageName], tokens: np.ndarray, admission: Admission
    ) -> None:
        self._lower, self._store, self._names, self._admission = lower, store, names, admission
        self._tokens = tokens
        self._written = 0
        self.pages = len(names)
        self.size = self.pages * lower.pool.page_bytes

    def write(self) -> None:
        """Write a copy: a store that hangs keeps no frame, and no index waits for it."""
        copies = self._copies()
        self._store.traffic.skipped("queue", self.pages - len(copies))
        if copies:
            self._written = self._store.write(self._lower.namespace, self._names[: len(copies)], copies)

    def _copies(self) -> list[memoryview]:
        """The bytes of the leading pages that are still indexed."""
        lower, size, copies = self._lower, self._lower.pool.page_size, list[memoryview]()
        few = max(1, LOCKED_BYTES // lower.pool.page_bytes)
        first = len(self._tokens) // size - self.pages
        while len(copies) < self.pages:
            end = min(self.pages, len(copies) + few)
            with lower.pool.lock:
                known = lower.index.peek(self._tokens[: (first + end) * size])[first + len(copies) :]
                pages = np.array(known, np.int64)
                with lower.pool.reading(pages, np.full_like(pages, size)) as sources:
                    copies += [memoryview(bytes(source.data())) for source in sources]
            if len(copies) < end:
                break
        return copies

    def drop(self) -> None:
        self._admission.missing(self._names[self._written :])
