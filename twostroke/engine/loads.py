"""Strokes that wait for pages: loaded on I/O threads, handed over between steps.

A lane whose pages are not in the pool waits, and others go on. A *load* brings the pages into fresh frames that nobody
else sees; the thread that steps takes what has come and lets the lanes continue from there. So a load that is late,
fails or is given up costs its lanes nothing but the time until its deadline, and a thread that still reads for it
writes into frames that belong to the load until it returns.

A load goes: queued, running, and then done, failed, or given up with a thread still inside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.engine.gate import SLACK, worthwhile
from twostroke.engine.lane import Lane, PrefillLane
from twostroke.engine.model import Model
from twostroke.engine.request import Choice
from twostroke.errors import OutOfPages, TwostrokeError
from twostroke.kv.arrival import Arrival
from twostroke.kv.cache import KVCache
from twostroke.kv.lower import Segment
from twostroke.kv.prefix import whole_pages
from twostroke.tiers.names import PageName
from twostroke.tiers.tiers import Tiers

log = logging.getLogger(__name__)

MOST_LOADS = 4  # that run at once
GRACE_S = 0.25  # seconds after its deadline in which a load may still tell what it has
RETURN_S = 5.0  # seconds after its deadline in which a thread that was given up is expected back

Computing = Callable[[int, int], float]  # predicted seconds to compute tokens: (entries before, tokens)


@dataclass(eq=False)
class Load:
    """Pages of one prompt, or of one value, on their way.

    Attributes:
        model: for which.
        known: what is brought into the pool first: a value in any tier.
        tokens: the prompt in whole pages as far as it may be looked for in stores; empty for a value.
        computing: predicts what computing takes; None: there are no stores.
        lanes: that wait for it.
        sources: the tiers of the pages after `known` that have come.
        error: why `known` could not be brought.
    """

    model: Model
    tiers: Tiers
    known: KVCache
    tokens: np.ndarray
    computing: Computing | None
    wake: Callable[[], None]
    lanes: list[Lane] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    error: TwostrokeError | None = None
    began: float = 0.0
    deadline: float | None = None
    running: bool = False
    done: bool = False
    _pages: list[int] = field(default_factory=list)
    _closed: bool = False
    _arrival: Arrival | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def grant(self) -> None:
        """There is room for it: its time begins."""
        self.began = time.perf_counter()
        missing = len(self.tokens) - len(self.known)
        if self.computing is not None and missing > 0:
            self.deadline = self.began + SLACK * self.computing(len(self.known), missing) + GRACE_S

    def run(self) -> None:
        """On an I/O thread."""
        try:
            if not self._closed:
                self._bring()
                self._ask()
        except TwostrokeError as error:
            error.__traceback__ = None  # it would keep pages
            self.error = error
        except Exception as error:
            log.exception("pages could not be loaded")
            self.error = TwostrokeError(f"pages could not be loaded: {error}")
        finally:
            self.running, self.done = False, True
            self.wake()

    def take(self) -> KVCache:
        """What has come so far; the load is over."""
        known, model = self.known, self.model
        with self._lock:
            self._closed = True
            pages, self._pages = self._pages, []
        try:
            if not pages:
                return known
            size = model.pool.page_size
            tokens = self.tokens[: len(known) + len(pages) * size]
            return whole_pages(model.pool, model.id, tokens, [*known.table[:, PAGE].tolist(), *pages])
        finally:
            if pages:
                model.pool.release(np.array(pages))

    def leave(self, lane: Lane) -> None:
        """A lane no longer waits. Without lanes the load is given up."""
        if lane in self.lanes:
            self.lanes.remove(lane)
        if not self.lanes:
            self.take()

    def _bring(self) -> None:
        began, pool = time.perf_counter(), self.model.pool
        kv = self.known.copy_to(pool)
        self._arrival = arrival = kv.arrival()  # open until the load is dropped: nothing may spill them before
        arrival.load()
        arrival.attach()
        if count := arrival.missing.get("host", 0):
            self.tiers.host_traffic.moved("in", count, count * pool.page_bytes, time.perf_counter() - began)
        self.known = kv

    def _ask(self) -> None:
        """Look for the prompt's pages. Whatever goes wrong, what has come stays, and the rest is computed."""
        if self.computing is not None and len(self.tokens) > len(self.known):
            try:
                self._search(self.computing)
            except Exception:
                log.exception("a tier failed")

    def _search(self, computing: Computing) -> None:
        lower, size = self.model.lower, self.model.pool.page_size
        assert lower is not None
        known = len(self.known)
        names = lower.names(self.tokens)[known // size :]
        segments = lower.find(names)

        def pages_cost(count: int) -> float:
            return computing(known, count * size)

        count = worthwhile(segments, pages_cost, self.tiers.links, self.model.pool.page_bytes)
        for segment in segments:
            refused = segment.stop - max(count, segment.start)
            if refused > 0:
                segment.store.traffic.skipped("slow", refused)
                log.info("%d pages stay in %s: computing them is predicted to be quicker", refused, segment.store.where)
        if not count:
            return
        self.deadline = self.began + SLACK * pages_cost(count) + GRACE_S
        slack = (SLACK - 1) * pages_cost(count)
        for segment in segments:
            for start in range(segment.start, min(segment.stop, count), lower.group):
                stop = min(start + lower.group, segment.stop, count)
                limit = pages_cost(stop) + slack - (time.perf_counter() - self.began)
                if limit <= 0 or not self._read(segment, names[start:stop], limit):
                    self._late(segment, count - len(self.sources), limit <= 0)
                    return

    def _read(self, segment: Segment, names: list[PageName], limit_s: float) -> bool:
        """Read some pages. Returns whether all have come, and are wanted."""
        lower = self.model.lower
        assert lower is not None
        try:
            pages = lower.read(segment.store, names, limit_s)
        except OutOfPages:  # others took the frames: the rest is computed when there is room
            return False
        with self._lock:
            if wanted := not self._closed:
                self._pages += pages
                self.sources += [segment.store.tier] * len(pages)
        if not wanted and pages:
            lower.pool.release(np.array(pages))
        return wanted and len(pages) == len(names)

    def _late(self, segment: Segment, pages: int, late: bool) -> None:
        if late:
            segment.store.traffic.skipped("late", pages)
            log.info("%d pages of %s had not come in time: they are computed", pages, segment.store.where)


class Loads:
    """All loads of an engine. Methods are called under the engine's lock."""

    def __init__(self, tiers: Tiers, wake: Callable[[], None]) -> None:
        """`wake` is called by I/O threads when a load is over."""
        self._tiers, self._wake = tiers, wake
        self._loads: list[Load] = []
        self._given_up: list[Load] = []  # with a thread still inside

    def __bool__(self) -> bool:
        return bool(self._loads)

    def add(self, lane: Lane) -> None:
        """Let a lane wait for what it misses, together with others that miss the same pages of a prompt."""
        missing = lane.missing
        assert missing is not None
        for load in self._loads:
            if lane.model is load.model and _same(load, missing.known, missing.tokens) and not load.done:
                load.lanes.append(lane)
                lane.load = load
                return
        lower = lane.model.lower
        computing = lower.computing if lower is not None and len(missing.tokens) else None
        load = Load(lane.model, self._tiers, missing.known, missing.tokens, computing, self._wake, [lane])
        lane.load = load
        self._loads.append(load)

    def start(self, may_start: Callable[[Lane], bool]) -> None:
        """Start loads for which there is room, as far as enough threads are free."""
        self._loads = [load for load in self._loads if self._wanted(load)]
        running = sum(load.running for load in self._loads) + len(self._given_up)
        for load in sorted(self._loads, key=lambda load: min(lane.choice.order for lane in load.lanes)):
            if load.running or load.done:
                continue
            if not load.began and may_start(load.lanes[0]):
                load.grant()
            if load.began and running < MOST_LOADS:
                load.running = True
                self._tiers.submit(load.run)
                running += 1

    def _wanted(self, load: Load) -> bool:
        if not load.lanes and load.running:
            self._given_up.append(load)
        return bool(load.lanes)

    def over(self) -> list[Load]:
        """Loads that are done or too late, which are forgotten here."""
        self._given_up = [load for load in self._given_up if not load.done]
        now = time.perf_counter()
        over = [load for load in self._loads if load.done or (load.deadline is not None and load.deadline < now)]
        self._loads = [load for load in self._loads if load not in over]
        self._given_up += [load for load in over if not load.done]
        return over

    @property
    def returning(self) -> bool:
        """Whether frames will soon come back from reads that are under way."""
        now = time.perf_counter()
        inside = [load for load in (*self._loads, *self._given_up) if load.running]
        return any(now < (load.deadline or load.began) + RETURN_S for load in inside)

    def patience(self) -> float | None:
        """Seconds until something must be looked at even if no load ends; None: nothing."""
        times = [load.deadline for load in self._loads if load.deadline is not None]
        times += [(load.deadline or load.began) + RETURN_S for load in self._given_up]
        return max(0.001, min(times) - time.perf_counter()) if times else None


def arrive(lane: Lane, load: Load, kv: KVCache, choice: Choice) -> None:
    """Let a lane of `choice` go on from what a load has brought; `kv` may belong to another lane's longer prompt.

    Raises what kept the value that the lane extends from coming.
    """
    if load.error is not None:
        raise load.error
    missing, request = lane.missing, choice.request
    assert missing is not None
    request.timings.loading += time.perf_counter() - load.began
    sources: list[str] = []
    if len(missing.tokens):
        size, known = kv.pool.page_size, len(missing.known)
        common = min(len(missing.tokens), len(kv))
        differ = np.flatnonzero(missing.tokens[:common] != kv.token_array[:common])
        end = max(known, (int(differ[0]) if len(differ) else common) // size * size)
        kv, sources = kv[:end], load.sources[: (end - known) // size]
    before = lane.cached.copy()
    lane.arrived(kv, sources)
    if isinstance(lane, PrefillLane):
        request.cached_by_tier += lane.cached - before


def _same(load: Load, known: KVCache, tokens: np.ndarray) -> bool:
    """Whether a load brings the first page that a prompt misses."""
    if not len(tokens) or not len(load.tokens):
        return load.known is known
    upto = len(known) + 1
    return len(load.known) == len(known) and bool(np.array_equal(load.tokens[: upto + 15], tokens[: upto + 15]))
