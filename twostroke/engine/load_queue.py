"""The queue of page loads: which run, which are over, and what lanes go on with.

A lane whose pages are not in the pool waits for a load (`page_load.py`), and others go on. A load is queued, then
running, and then done, failed, or abandoned while a thread is still inside.
"""

import math
from collections.abc import Callable

import numpy as np

from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.forecast import Forecast
from twostroke.engine.lane import Lane
from twostroke.engine.model import Model
from twostroke.engine.page_load import PageLoad
from twostroke.engine.prefill_lane import PrefillLane
from twostroke.engine.prefix_match import MissingPages
from twostroke.engine.request import Choice
from twostroke.errors import PageLost
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import POOL
from twostroke.kv.tiers.tiers import Tiers

MAX_LOADS = 4  # loads that call stores at once
RETURN_S = 5.0  # seconds in which the thread of an abandoned load is expected back


class LoadQueue:
    """All loads that have not ended. Methods are called under the engine's lock."""

    def __init__(self, tiers: Tiers, wake: Callable[[], None], clock: Clock = SYSTEM) -> None:
        """`wake` is called by I/O threads when a load is over."""
        self._tiers, self._wake, self._clock = tiers, wake, clock
        self._loads: list[PageLoad] = []
        self._abandoned: list[PageLoad] = []  # a thread still runs each
        self.busy = False  # whether there is any. It is read at every step, so it is stored, not computed.

    def add(self, choice: Choice, lane: Lane) -> None:
        """Let a lane wait for what it misses, together with others that miss the same."""
        missing = lane.missing
        assert missing is not None
        load = next((one for one in self._loads if _serves(one, lane.model, missing)), None)
        if load is None:
            stores = lane.model.backing_stores
            computing = stores.computing if stores is not None and len(missing.tokens) else None
            load = PageLoad(
                lane.model, self._tiers, missing.known, missing.tokens, computing, self._wake, clock=self._clock
            )
            self._loads.append(load)
            self.busy = True
        load.add(choice, lane)

    def start(self, may_start: Callable[[Choice, Lane], bool]) -> None:
        """Start loads for which there is room, as far as enough threads are free."""
        self._abandoned += [load for load in self._loads if not load.waiting and load.running]
        self._loads = [load for load in self._loads if load.waiting]
        self.busy = bool(self._loads or self._abandoned)
        running = sum(load.running and not load.copies_only for load in self._loads)
        for load in sorted(self._loads, key=lambda load: min(choice.order for choice, _ in load.waiting)):
            if load.running or load.done:
                continue
            if not load.began and may_start(*load.waiting[0]):
                load.admit()
            if load.began and (load.copies_only or running < MAX_LOADS):
                running += not load.copies_only
                self._run(load)

    def _run(self, load: PageLoad) -> None:
        speed = self._tiers.speeds.get(load.known.tier)
        if speed is not None and speed.closed:
            load.error = PageLost(f"the {load.known.tier} tier does not answer: ask again, or compute the value again")
            load.done = True
            self._wake()
            return
        load.refresh()
        load.start()

    def pop_finished(self) -> list[PageLoad]:
        """Remove and return the loads that are done or overdue."""
        now = self._clock()
        over = [load for load in self._loads if load.done or load.deadline() < now]
        self._loads = [load for load in self._loads if load not in over]
        self._abandoned += [load for load in over if load.running]
        self._abandoned = [load for load in self._abandoned if load.running]
        for load in self._abandoned:
            if load.deadline() < now:
                load.mark_stuck()
        return over

    @property
    def frames_returning(self) -> bool:
        """Whether reads that are under way will soon free frames. Those of a load that lanes wait for are wanted."""
        unwanted = [*(load for load in self._loads if not load.waiting), *self._abandoned]
        now = self._clock() if unwanted else 0.0
        return any(now < load.deadline() + RETURN_S for load in unwanted if load.running)

    @property
    def unfinished(self) -> list[PageLoad]:
        """The loads that are queued or running, and the abandoned ones that a thread still runs."""
        return [*self._loads, *self._abandoned]

    def next_deadline(self) -> float | None:
        """Seconds until a load becomes overdue; None if none will."""
        now = self._clock()
        times = [load.deadline() for load in self._loads]
        times += [one for load in self._abandoned for one in (load.deadline(), load.deadline() + RETURN_S) if one > now]
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(0.001, soonest - now)


def measure_stores(forecast: Forecast, chunk: int) -> None:
    """Time the stores of each model, so that loads choose what is faster: loading pages or computing them."""
    for model in forecast.models:
        if model.backing_stores is not None:
            model.backing_stores.probe()
            model.backing_stores.computing = forecast.prefill(model, chunk)


def resume_lane(lane: Lane, load: PageLoad, kv: KVCache, choice: Choice) -> None:
    """Let a lane of `choice` continue from what a load has brought.

    Raises the load's error if the value that the lane extends could not be loaded.
    """
    if load.error is not None:
        raise load.error
    missing, request = lane.missing, choice.request
    assert missing is not None
    request.timings.loading += load.clock() - load.began
    before = lane.cached.copy()
    lane.resume_from(kv, load.sources)
    if isinstance(lane, PrefillLane):
        request.cached_by_tier += lane.cached - before


def _serves(load: PageLoad, model: Model, missing: MissingPages) -> bool:
    """Whether a load brings what a lane misses: the same value, or the same prompt from the same page on."""
    wanted = load.waiting and not load.done  # else it was abandoned, or taken
    if not wanted or model is not load.model or not np.array_equal(load.tokens, missing.tokens):
        return False
    if not len(missing.tokens) or missing.known.tier != POOL:
        return load.known is missing.known
    return len(load.known) == len(missing.known)
