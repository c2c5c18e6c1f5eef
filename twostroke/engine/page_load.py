"""A page load brings pages from other tiers into the pool, for lanes that wait for them.

It runs on an I/O thread and fills fresh frames that nobody else sees; the thread that steps takes what has come. So a
load that is late, fails or is abandoned costs its lanes nothing but the time until then, and a thread that still reads
for it writes into frames that belong to the load until it returns.

It has two parts. First it loads the value that the lanes extend: pages of the index that are in the host, or a value
that a program holds in another tier. Nothing can replace a value, so this may take long, as long as pages keep coming.
Then it queries the stores for more pages of the prompt, which may take 1.1 times as long as computing them.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.lane import Lane
from twostroke.engine.model import Model
from twostroke.engine.request import Choice
from twostroke.errors import OutOfPages, PageLost, TwostrokeError
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import HOST, NOWHERE, POOL
from twostroke.kv.prefix_index import value_of_pages
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.stored_runs import SLACK, StoredRun, num_blocks, pages_worth_loading
from twostroke.kv.swap_in import SwapIn
from twostroke.kv.tiers.names import PageName
from twostroke.kv.tiers.speed import TransferSpeed
from twostroke.kv.tiers.tiers import Tiers

log = logging.getLogger(__name__)

GRACE_S = 0.25  # seconds after its time limit in which a load may still hand over what it has
VALUE_PAGE_S = 30.0  # seconds in which a tier must deliver the next page of a value

Computing = Callable[[int, int], float]  # predicted seconds to compute tokens: (entries before, tokens)


@dataclass(eq=False)
class PageLoad:
    """Pages of one prompt, or of one value, on their way into the pool."""

    model: Model  # the model whose pages they are
    tiers: Tiers  # where they come from
    known: KVCache  # what is loaded first: a value in any tier
    tokens: np.ndarray  # the prompt in whole pages as far as it may be looked for in stores; empty for a value
    computing: Computing | None  # predicts how long computing takes; None: there are no stores
    wake: Callable[[], None]  # called when the load is over
    clock: Clock = SYSTEM  # the source of time
    waiting: list[tuple[Choice, Lane]] = field(default_factory=list)  # the lanes that wait for it, with their choices
    absent: bool = False  # whether `known` is not in the pool
    # the tiers of the pages after the `known` of its lanes that have come
    sources: list[str] = field(default_factory=list)
    error: TwostrokeError | None = None  # why `known` could not be loaded
    began: float = 0.0
    until: float = math.inf  # when the rest of the prompt is computed instead
    running: bool = False  # a thread works on it; done: it has ended
    done: bool = False
    calling: str | None = None  # the tier whose store it is calling
    _since: float = 0.0  # when the time to ask began
    _pages: np.ndarray = field(init=False)  # of the blocks that have come, and of a snapshot's parts, [n, groups]
    _num_blocks: int = 0  # of those that are read before a snapshot
    _closed: bool = False  # nobody wants what still comes
    _ended: bool = False
    _arrival: SwapIn | None = None
    _moved: float = 0.0  # when `_arrival` had `_num_moved` pages
    _num_moved: int = 0
    _stuck: TransferSpeed | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        kv, pool = self.known, self.model.pool
        self._pages = np.zeros((0, pool.num_groups), np.int64)
        here = kv.pool is pool and kv.tier == POOL
        self.absent = not here or bool(np.count_nonzero(pool.frames.absent(kv.entry_table.pages)))

    # Called by the thread that steps ----------------------------------------------------------------------------

    @property
    def searches_stores(self) -> bool:
        return self.computing is not None and len(self.tokens) > len(self.known)

    @property
    def copies_only(self) -> bool:
        return not self.searches_stores and self.known.tier not in self.tiers.speeds

    def admit(self) -> None:
        """Start the time limit: there is room for the pages."""
        self.began = self.clock()
        self._limit(self.began)

    def refresh(self) -> None:
        """Use pages that others have computed or loaded while this load was queued."""
        index, before = self.model.index, len(self.known)
        if index is not None and len(self.tokens) and not self.absent:
            self.known, pool = index.extend_match(self.known, self.tokens), self.model.pool
            more = self.known.table[before // pool.page_size :, PAGE].tolist()  # a block's pages come and go together
            self.sources = [HOST if pool.frame(page) == NOWHERE else POOL for page in more]
            self.__post_init__()

    def start(self) -> None:
        """Run the load on an I/O thread."""
        self.running, self._moved = True, self.clock()
        self.tiers.submit(self.run)

    def deadline(self) -> float:
        """The time after which the load is overdue, unless another page comes."""
        if self.running and self.absent:
            count = 0 if self._arrival is None else self._arrival.num_loaded
            if count != self._num_moved:
                self._num_moved, self._moved = count, self.clock()
            return self._moved + VALUE_PAGE_S
        return math.inf if self.absent else self.until  # what is not in the pool has to be brought in any case

    def abandon(self) -> None:
        """Stop waiting for the load, although a thread may still run it."""
        with self._lock:
            self._closed = True
            if self.absent and self.error is None:
                self.error = PageLost(
                    f"the {self.calling or HOST} tier gave no page of a value for {VALUE_PAGE_S:.0f} s: ask again, or "
                    f"compute the value again"
                )

    def mark_stuck(self) -> None:
        """Mark the store as stuck: the thread should have returned from it."""
        with self._lock:
            if self.running and self._stuck is None and self.calling is not None:
                self._stuck = self.tiers.speeds[self.calling]
                self._stuck.add_stuck(1)
                log.warning("the %s tier does not answer", self.calling)

    def take(self) -> KVCache:
        """End the load, and return the value that has come so far."""
        known, model = self.known, self.model
        with self._lock:
            self._closed = True
            pages, self._pages = self._pages, self._pages[:0]
        try:
            blocks, parts = pages, pages[:0]
            if model.pool.geometry.states:
                blocks, parts = np.split(pages, [self._num_blocks])
            state = parts[parts != NO_PAGE][: model.pool.snapshot_pages]
            if len(state) < model.pool.snapshot_pages:
                del self.sources[len(self.sources) - len(blocks) :]
                blocks = blocks[:0]
            if not len(blocks):
                return known
            size = model.pool.page_size
            tokens = self.tokens[: len(known) + len(blocks) * size]
            table = np.concatenate([known.table[:, PAGE:], blocks])
            return value_of_pages(model.pool, model.id, tokens, table, state.tolist())
        finally:
            self._release(pages)

    def add(self, choice: Choice, lane: Lane) -> None:
        """Let a lane wait for the load, until the pages come or the lane is closed."""
        self.waiting.append((choice, lane))
        lane.on_close = lambda: self._remove(lane)

    def _remove(self, lane: Lane) -> None:
        """Remove a lane that no longer waits. Without lanes nobody wants the pages."""
        self.waiting = [one for one in self.waiting if one[1] is not lane]
        if not self.waiting:
            self.take()
            self.close()

    def close(self) -> None:
        """Release all pages. Frames that a thread still fills are freed when it returns."""
        with self._lock:
            self._ended = True
            arrival, self._arrival = self._arrival, None
            if not self.running:
                self._drop_value()
        if arrival is not None:
            arrival.close()

    # Called by an I/O thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Load the value, then query the stores. Called on an I/O thread."""
        try:
            in_time = self.clock() < self.until
            if self.absent:
                self._load_value()
                self._limit(self.clock())
            if in_time and self.searches_stores:
                self._query_stores()
        except TwostrokeError as error:
            error.__traceback__ = None  # it would keep pages
            self.error = self.error or error
        except Exception as error:
            log.exception("pages could not be loaded")
            self.error = TwostrokeError(f"pages could not be loaded: {error}")
        finally:
            with self._lock:
                self.running, self.done, self.calling = False, True, None
                if self._stuck is not None:
                    self._stuck.add_stuck(-1)
                if self._ended:
                    self._drop_value()
            self.wake()

    def _drop_value(self) -> None:
        self.known = KVCache.empty(self.model.pool)  # the engine may have no step for a long time

    def _limit(self, now: float) -> None:
        missing = len(self.tokens) - len(self.known)
        if self.computing is not None and missing > 0:
            self._since, self.until = now, now + SLACK * self.computing(len(self.known), missing) + GRACE_S

    def _load_value(self) -> None:
        began, pool = self.clock(), self.model.pool
        self.calling = self.known.tier if self.known.tier in self.tiers.speeds else None
        kv = self.known if self.known.pool is pool else self.known.copy_to(pool)
        arrival = kv.swap_in()  # open until the load is closed: nothing may spill them before
        with self._lock:
            if not self._closed:
                self._arrival = arrival
        if self._arrival is None:
            arrival.close()
            return
        arrival.load()
        with self._lock:
            if self._closed:
                return
            arrival.publish()
            self.known, self.absent, self.calling = kv.to(POOL), False, None
        if list(arrival.missing) == [HOST]:  # the index counts the pages
            self.tiers.host_counters.moved("in", 0, 0, self.clock() - began)

    def _query_stores(self) -> None:
        """Look for the prompt's pages. After an error, what has come stays, and the rest is computed."""
        if self.computing is not None and not self._closed:
            try:
                self._search(self.computing)
            except Exception:
                log.exception("a tier failed")

    def _search(self, computing: Computing) -> None:
        stores, size = self.model.backing_stores, self.model.pool.page_size
        assert stores is not None
        known, began = len(self.known), self._since
        names, segments = stores.find(stores.names(self.tokens)[known // size :], self._set_calling)
        self._num_blocks = num_blocks(segments)

        def pages_cost(count: int) -> float:
            return computing(known, min(count, self._num_blocks) * size)

        count = pages_worth_loading(segments, pages_cost, self.tiers.speeds, self.model.pool.block_bytes)
        for segment in segments:
            refused = segment.stop - max(count, segment.start)
            if refused > 0:
                segment.store.counters.skipped("slow", refused)
                self.tiers.speeds[segment.store.tier].not_worthwhile()
                log.info("%d pages stay in %s: computing them is predicted to be quicker", refused, segment.store.where)
        if not count:
            return
        self.until = began + SLACK * pages_cost(count) + GRACE_S
        slack = (SLACK - 1) * pages_cost(count)
        for segment in segments:
            for start in range(segment.start, min(segment.stop, count), stores.group):
                stop = min(start + stores.group, segment.stop, count)
                limit = pages_cost(stop) + slack - (self.clock() - began)
                if limit <= 0 or not self._read(segment, names[start:stop], limit):
                    self._count_late(segment, count - start, limit <= 0)
                    return
            if segment.snapshot:
                segment.store.counters.snapshot("in")

    def _set_calling(self, tier: str) -> None:
        self.calling = tier

    def _read(self, segment: StoredRun, names: list[PageName], limit_s: float) -> bool:
        """Read some pages. Returns whether all have come, and are wanted."""
        stores = self.model.backing_stores
        assert stores is not None
        self._set_calling(segment.store.tier)
        try:
            pages = stores.read(segment.store, names, limit_s)
        except OutOfPages:  # others took the frames: the rest is computed when there is room
            return False
        passed = pages
        with self._lock:
            if wanted := not self._closed:
                self._pages = np.concatenate([self._pages, pages])
                self.sources += [] if segment.snapshot else [segment.store.tier] * len(pages)
                passed = pages[:0] if segment.snapshot else self._take_passed()
        self._release(passed)
        return wanted and len(pages) == len(names)

    def _take_passed(self) -> np.ndarray:
        """The pages of windowed layers that the token after the last block does not attend to."""
        groups, size, passed = self.model.pool.geometry.groups, self.model.pool.page_size, list[np.ndarray]()
        for g, group in enumerate(groups):
            if (seen := group.blocks_in_window(size)) is not None and seen < len(self._pages):
                passed.append(self._pages[: len(self._pages) - seen, g].copy())
                self._pages[: len(self._pages) - seen, g] = NO_PAGE
        return np.concatenate([np.zeros(0, np.int64), *passed])

    def _release(self, pages: np.ndarray) -> None:
        pages = pages[pages != NO_PAGE]
        if len(pages):
            self.model.pool.release(pages)

    def _count_late(self, segment: StoredRun, pages: int, late: bool) -> None:
        if late:
            segment.store.counters.skipped("late", pages)
            log.info("%d pages of %s had not come in time: they are computed", pages, segment.store.where)
