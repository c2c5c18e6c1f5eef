"""The stores below one model's prefix index: their pages are found, read and written by keys.

What a store calls a page is a *block*: the pages of all groups of layers that hold K and V of the same tokens, one
after another. A snapshot of states is cut into *parts* of that size, which lie behind the block at its end.

A snapshot may be as large as K and V of 1,600 tokens, so few are written. Prompts leave them at their ends, at those of
steps and of answers, and where prompts part. A store gets one only if it spares enough, which is what computing takes
from the snapshot before it that the store has: more than loading it, and `Tiers.first_touch_s`, unless its tokens came
before. So there is at most one for each second of computing that came once, and a conversation that goes on after a
restart computes at most a second of it again.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import Pin
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.stored_runs import StoredRun, num_blocks
from twostroke.kv.tiers.admission import Admission
from twostroke.kv.tiers.names import Namespace, PageName, chain, private_name, snapshot_names
from twostroke.kv.tiers.store import Store
from twostroke.kv.tiers.tiers import Tiers
from twostroke.kv.write_back import QueuedWrite, WriteBack, WriteBackBlock

log = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20  # bytes that are read or written at once
TOUCHES = {"disk": 2, "remote": 1}
SNAPSHOT_TOUCHES = 2
MAX_RUNS = 8
MAX_ONCE = 4096  # prompts


class BackingStores:
    """The stores of one model. `find` and `read` are called from I/O threads."""

    def __init__(self, tiers: Tiers, index: PrefixIndex, name: str) -> None:
        self.tiers, self.index, self.pool = tiers, index, (pool := index.pool)
        # predicted seconds to compute (context, count) tokens; the engine sets it once it has measured
        self.computing: Callable[[int, int], float] = lambda context, count: 0.0
        geometry, layout = pool.geometry.fingerprint, pool.memory.layout
        # what its pages have in common
        self.namespace = Namespace(name, index.model, geometry, layout, pool.page_size, pool.block_bytes)
        # number of pages that are read or written at once
        self.group = max(1, min(GROUP_BYTES // pool.block_bytes, pool.num_pages // pool.num_groups // 8))
        self._columns = np.array([group for group, _ in pool.geometry.kv_groups])
        self._parts = -(-pool.snapshot_pages // len(self._columns))  # of a snapshot
        self.write_back = WriteBack(index)  # what waits to be written
        self._once: deque[np.ndarray] = deque(maxlen=MAX_ONCE)  # tokens of prompts and answers with pages used once
        self._admissions = {store.tier: Admission(TOUCHES[store.tier]) for store in tiers.stores}
        self._snapshots = {store.tier: Admission(SNAPSHOT_TOUCHES) for store in tiers.stores}

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
        """Whether loading the least that helps might be quicker than computing `count` tokens after `context`."""
        seconds, links = self.computing(context, count), self.tiers.speeds.values()
        least = (1 + self._parts) * self.pool.block_bytes
        worth = any(link.seconds(least) < seconds for link in links if not link.closed)
        for link in () if worth else links:
            link.not_worthwhile()
        return worth

    def names(self, tokens: np.ndarray) -> list[PageName]:
        return chain(self.namespace, tokens)

    def find(self, names: Sequence[PageName], asking: Callable[[str], None]) -> tuple[list[PageName], list[StoredRun]]:
        """Find the leading blocks, each in the nearest store that has it. `asking` is called with each tier before.

        Returns what may be read, and where it is. With recurrent layers that ends at the last snapshot that is there.
        """
        segments, asked = self._find_blocks(names, asking)
        found = list(names[: num_blocks(segments)])
        if self._parts:
            found, segments = self._up_to_snapshot(found, segments, asking)
        for store, at in asked:
            here = (run for run in segments if (run.store, run.start, run.snapshot) == (store, at, False))
            hits = sum(run.stop - run.start for run in here)
            store.counters.looked_up(hits, len(names) - at - hits)
        return found, segments

    def _find_blocks(
        self, names: Sequence[PageName], asking: Callable[[str], None]
    ) -> tuple[list[StoredRun], list[tuple[Store, int]]]:
        """Where the leading blocks are, and which stores were asked from which block on."""
        segments, asked = list[StoredRun](), list[tuple[Store, int]]()
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
                asked.append((store, done))
                if count:
                    admission.found(names[done : done + count])
                    segments.append(StoredRun(store, done, done + count))
                    done += count
                    break
                admission.missing(names[done:])
            else:
                break
        return segments, asked

    def _up_to_snapshot(
        self, names: list[PageName], segments: list[StoredRun], asking: Callable[[str], None]
    ) -> tuple[list[PageName], list[StoredRun]]:
        """Blocks up to the last snapshot all of whose parts one store has, and these parts; nothing without one."""
        end, parts, where = 0, list[PageName](), None
        for store in self.tiers.stores:
            left = [one for one in self._boundaries(names) if one > end]
            asking(store.tier)
            while left and not self.tiers.speeds[store.tier].closed:
                first = store.find_any(self.namespace, [snapshot_names(names[one - 1], 1)[0] for one in left])
                if first == len(left):
                    break
                some = snapshot_names(names[left[first] - 1], self._parts)
                count = store.find(self.namespace, some)
                self._snapshots[store.tier].found(some[:count])
                self._snapshots[store.tier].missing(some[count:])
                if count == self._parts:
                    end, parts, where = left[first], some, store
                    break
                left = left[first + 1 :]
        if where is None:
            return [], []
        blocks = [replace(run, stop=min(run.stop, end)) for run in segments if run.start < end]
        return [*names[:end], *parts], [*blocks, StoredRun(where, end, end + len(parts), snapshot=True)]

    def _boundaries(self, names: Sequence[PageName]) -> list[int]:
        """After how many of these blocks a snapshot may be, the most first; none without recurrent layers."""
        if not self._parts:
            return []
        size, chunk = self.pool.page_size, self.pool.geometry.chunk
        return [i + 1 for i in reversed(range(len(names))) if (names[i].number + 1) * size % chunk == 0]

    def read(self, store: Store, names: Sequence[PageName], limit_s: float) -> np.ndarray:
        """Read blocks, or parts of a snapshot, into fresh frames.

        Returns the pages of the leading ones that are right, [n, groups], each with a reference for the caller; NO_PAGE
        for groups without K and V. Raises OutOfPages.
        """
        pool, groups = self.pool, len(self._columns)
        pool.make_room(len(names) * groups)
        kinds = np.full(groups, pool.num_groups) if names[0].of_state else self._columns
        pages = np.array(pool.allocate(len(names) * groups, np.tile(kinds, len(names))), np.int64)
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
            admissions = self._snapshots if names[0].of_state else self._admissions
            admissions[store.tier].missing(names[count:])
        found = np.full((count, pool.num_groups), NO_PAGE, np.int64)
        found[:, self._columns] = pages[: count * groups].reshape(-1, groups)
        return found

    @contextmanager
    def _filling(self, pages: np.ndarray, views: ExitStack) -> Generator[list[memoryview]]:
        """Writable bytes of blocks, whose pages are the given ones in turn: those of the pages, if blocks have one."""
        frames, size = self.pool.frames_of(pages).tolist(), self.pool.page_bytes
        fills = [views.enter_context(self.pool.memory.filling(frame)) for frame in frames]
        if len(self._columns) == 1:
            yield fills
            return
        blocks = [memoryview(bytearray(self.pool.block_bytes)) for _ in range(0, len(pages), len(self._columns))]
        yield blocks
        parts = (block[at : at + size] for block in blocks for at in range(0, len(block), size))
        for fill, part in zip(fills, parts, strict=True):
            fill[:] = part

    def insert(self, kv: KVCache, start: int, again: bool = False, parting: int = 0) -> None:
        """Index a value's canonical pages, count a use of them from page `start` on, and queue those that are admitted.

        `again`: they will soon be asked for again. `parting`: the entries after which another prompt goes on in another
        way, so the state there was needed twice. Returns at once. What waits to be written holds no page.
        """
        with self.pool.lock:  # no page may leave the index in between
            blocks, size = self.index.insert(kv), self.pool.page_size
            if len(blocks) <= start and not again:
                return
            offered = self.write_back.enqueue(blocks)
            ends = {one.at // size for one in kv.entry_table.snapshots if one.at % size == 0}
            snapshots = {
                end: self.write_back.enqueue_snapshot(blocks[end - 1])
                for end in sorted(ends)
                if (0 if again else start) < end <= len(blocks)
            }
        tokens = kv.token_array[: len(blocks) * size]
        self.tiers.note(partial(self._admit, tokens, offered, snapshots, start, again, parting // size))

    def write_rest(self) -> None:
        """Queue the pages that were used only once, where loading them is quicker than computing them.

        For a process that ends and whose model will come back. It may take as long as a load.
        """
        self.tiers.flush()
        for tokens in list(self._once):
            self.insert(self.index.match(tokens), 0, again=True)

    def _admit(
        self,
        tokens: np.ndarray,
        offered: list[WriteBackBlock],
        snapshots: dict[int, list[WriteBackBlock]],
        start: int,
        again: bool,
        parting: int,
    ) -> None:
        names, seconds = self.names(tokens), self.computing(0, len(tokens))
        for store in self.tiers.stores:
            tier, admission = store.tier, self._admissions[store.tier]
            outbox, quicker = self.tiers.write_queues[tier], self._load_seconds(tier, len(names)) < seconds
            at_once = TOUCHES[tier] == 1 or seconds >= self.tiers.first_touch_s or (again and quicker)
            first, stop = admission.touch(names, start, at_once)
            store.counters.skipped("second_touch", once := max(0, len(names) - max(stop, start)))
            if once:
                self._once.append(tokens)
            if first:
                known = self._last_snapshot(self._snapshots[tier], names[:first])
                parts = snapshot_names(names[known - 1], self._parts) if known else []
                outbox.run(partial(store.touch, self.namespace, [*names[:first], *parts]))
            for at in range(first, stop, self.group):
                end = min(at + self.group, stop)
                self._push(store, admission, names[at:end], offered[at:end])
            for end, own in snapshots.items():
                if own:
                    soon = end == parting or (again and quicker)
                    self._admit_snapshot(store, names[:end], own, end <= stop, soon)

    def _admit_snapshot(
        self, store: Store, names: list[PageName], offered: list[WriteBackBlock], there: bool, soon: bool
    ) -> None:
        """Queue the snapshot behind some blocks if it is worth its bytes.

        `there`: the blocks are in the store, or queued. `soon`: somebody will need it, or did.
        """
        tier, admission, size = store.tier, self._snapshots[store.tier], self.pool.page_size
        known = self._last_snapshot(admission, names[:-1])
        spared, parts = self.computing(known * size, (len(names) - known) * size), len(offered)
        if spared <= self._load_seconds(tier, parts):
            store.counters.skipped("near", parts)
            return
        own = snapshot_names(names[-1], parts)
        first, stop = admission.touch(own, 0, there and (soon or spared >= self.tiers.first_touch_s))
        if stop < parts:
            store.counters.skipped("second_touch", parts - stop)
        elif not there:
            admission.missing(own[first:])
        elif first < stop:
            self._push(store, admission, own[first:], offered[first:])

    def _last_snapshot(self, admission: Admission, names: Sequence[PageName]) -> int:
        """After how many of these blocks the last snapshot is that a store has; 0 if it has none."""
        there = (end for end in self._boundaries(names) if admission.holds(snapshot_names(names[end - 1], 1)[0]))
        return next(there, 0)

    def _push(self, store: Store, admission: Admission, names: list[PageName], offered: list[WriteBackBlock]) -> None:
        write = QueuedWrite(self.write_back, self.namespace, store, admission, names, offered, self.group)
        self.tiers.write_queues[store.tier].push(write)

    def _load_seconds(self, tier: str, pages: int) -> float:
        return self.tiers.speeds[tier].seconds(pages * self.pool.block_bytes)
