"""The step loop: all requests share each forward pass."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.driver import Driver
from twostroke.engine.fair_lock import FairLock
from twostroke.engine.flight import Flight, Step
from twostroke.engine.forecast import Forecast
from twostroke.engine.lane import Lane
from twostroke.engine.loads import Loads, arrive, predict
from twostroke.engine.model import Model
from twostroke.engine.objective import comfortable_itl_ms
from twostroke.engine.placement import Placement
from twostroke.engine.queues import Queues
from twostroke.engine.request import Choice, Request
from twostroke.engine.runner import Chunk, run
from twostroke.engine.scheduler import Plan, SchedulerConfig, plan
from twostroke.engine.track import Token
from twostroke.engine.turns import Turns
from twostroke.engine.watch import Watch
from twostroke.errors import ContextLengthExceeded, EngineFailed, EngineStopped, OutOfPages, TwostrokeError
from twostroke.kv.pool import PagePool
from twostroke.tiers.tiers import Tiers

log = logging.getLogger(__name__)
CLOSED = "this model is closed: open it again"
CUT = "a step of this model was interrupted, so its requests have ended: ask again"


@dataclass(frozen=True)
class StepReport:
    """Tokens that a step computed, in decoding lanes and in chunks (including replays).

    `predicted_s` is the predicted duration in seconds; None without an ITL objective.
    """

    prefill: int = 0
    decode: int = 0
    predicted_s: float | None = None

    @classmethod
    def of(cls, chunks: Sequence[Chunk], predicted_s: float | None) -> StepReport:
        decode = sum(len(chunk.tokens) == 1 and isinstance(chunk.lane, DecodeLane) for chunk in chunks)
        return cls(sum(len(chunk.tokens) for chunk in chunks) - decode, decode, predicted_s)


class Engine:
    """Runs requests over one or more models.

    A caller that waits for tokens steps, and a step serves every request. Any number of threads may wait: one of them
    steps at a time, and the others wait for what it brings. Programs run in whichever thread steps. Setting an ITL
    objective calibrates the models first, which takes about a second each.

    Attributes:
        models: by role, the name that programs use; one model may have several roles.
        tiers: where pages may be besides the pools.
        on_arrival: called by an I/O thread when pages have come that a request waits for.
        report: the tokens that the last step computed.
        watch: gets a record of each step; None while nobody watches. Any thread may set it.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        default: str,
        config: SchedulerConfig | None = None,
        tiers: Tiers | None = None,
        clock: Clock = SYSTEM,
        forecast: Forecast | None = None,
    ) -> None:
        """`clock` is where it reads time. `forecast` predicts steps; None: models are calibrated when it is needed."""
        self.models, self.default = dict(models), default
        self._lock = FairLock()  # held for every change of the engine's state
        self._turns = Turns()
        self.on_arrival: Callable[[], None] | None = None
        self.watch: Watch | None = None
        self._closed = False
        self._clock, self._forecast = clock, forecast
        self.tiers = tiers or Tiers()
        self.config = config or SchedulerConfig()
        self._requests: set[Request] = set()  # keeps requests alive: choices hold weak references
        self._queues = Queues()
        arrival = weakref.WeakMethod(self._arrival)  # no cycle: a dropped engine is gone at once

        def wake() -> None:
            if (called := arrival()) is not None:
                called()

        self._driver, self._loads = Driver(self.models, default, wake, clock), Loads(self.tiers, wake, clock)
        unique = dict.fromkeys(self.models.values())
        self._placement = Placement(unique, self._queues, self._driver.keep, self._loads, clock)
        self._flight = Flight(self._driver, self._placement, clock)
        if self.tiers.stores:
            predict(self._calibrate(), self.config.max_step_tokens)
        self.report = StepReport()

    @property
    def config(self) -> SchedulerConfig:
        """Limits of a step. It may be replaced between steps."""
        return self._config

    @config.setter
    def config(self, config: SchedulerConfig) -> None:
        with self._lock:
            if config.itl_ms is not None:
                self._calibrate()
            self._config = config

    def _calibrate(self) -> Forecast:
        """Forecasts of steps; the first call times the models. The caller holds the lock."""
        if self._forecast is None:
            self._forecast = Forecast.calibrated(self.models.values())
        return self._forecast

    def choose_itl(self) -> None:
        """Set an ITL objective by what a decode step costs here (`engine/objective.py`)."""
        with self._lock:
            step_s = self._calibrate().decode_step(self.models[self.default])
        self.config = replace(self.config, itl_ms=comfortable_itl_ms(step_s))

    def prefill_seconds(self, model: Model) -> Callable[[int, int], float]:
        """Predicts the seconds to compute tokens of one prompt alone: (entries before, tokens).

        The first call calibrates the models, unless that is done.
        """
        with self._lock:
            return self._calibrate().prefill(model, self.config.max_step_tokens)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def choices(self) -> list[Choice]:
        """All choices that have not ended."""
        return [*self._queues.active, *self._queues.waiting]

    @property
    def num_arriving(self) -> int:
        """Number of choices that wait for pages from other tiers; they do not count as running."""
        return len(self._queues.arriving)

    @property
    def lanes(self) -> list[Lane]:
        """The strokes in flight of all choices that have started, in order of arrival."""
        return [lane for choice in self._queues.active for lane in choice.lanes]

    def cached_pages(self, pool: PagePool) -> int:
        """Number of the pool's pages that are held by prefix indexes."""
        models = dict.fromkeys(self.models.values())
        return sum(model.index.num_in_pool for model in models if model.index is not None and model.pool is pool)

    @property
    def failure(self) -> EngineFailed | None:
        """Why nothing can be computed any more: a rank of a backend is lost."""
        return next((found for model in self.models.values() if (found := model.backend.failure) is not None), None)

    @property
    def preemptions(self) -> int:
        """Number of times that a choice was preempted."""
        return self._placement.preemptions

    @property
    def evicted_pages(self) -> int:
        """Number of times that a page of a prefix index had to give up its frame."""
        indexes = {model.index for model in self.models.values()}
        return sum(index.evicted_pages for index in indexes if index is not None)

    def submit(self, request: Request) -> Request:
        """Queue a request. Raises EngineStopped after `close`."""
        try:
            with self._lock:
                if self._closed:
                    raise EngineStopped(CLOSED)
                self._requests.add(request)
                for choice in request.choices:
                    self._queues.wait(choice)
            self._turns.tell()
        except BaseException:  # also Ctrl-C, which comes when the lock is released
            self.drop(request)
            raise
        return request

    def run(self, requests: Sequence[Request]) -> None:
        """Run requests to their ends: `submit` and `finish`. Cancels all of them if one cannot be submitted."""
        try:
            for request in requests:
                self.submit(request)
            self.finish(requests)
        finally:
            for request in requests:
                self.drop(request)

    def cancel(self, request: Request) -> None:
        """End a request and free its pages, once the step that another thread is in is over."""
        if request.done:
            return
        if self._lock.mine:  # called by a program or by a callback of a step
            self._cancel(request)
            return
        try:
            with self._lock:
                self._cancel(request)
        finally:
            self._turns.tell()

    def drop(self, request: Request) -> None:
        """`cancel` for finalizers: at once if no step is running, else after it. Never waits."""
        if not request.done:
            self._lock.defer(lambda: self._cancel(request))

    def close(self) -> None:
        """End every request with EngineStopped, take no more, close the tiers, and drop the prefix indexes."""
        try:
            with self._lock:
                self._closed = True
                for request in list(self._requests):
                    self._fail({request}, EngineStopped(CLOSED))
            self.tiers.close()  # first: what waits to be written is in the indexes
            with self._lock:
                for model in dict.fromkeys(self.models.values()):
                    if model.index is not None:
                        model.index.clear()
                self._placement.close()
        finally:
            self._turns.tell()

    def _cancel(self, request: Request) -> None:
        if not request.done:
            request.cancelled = True
            self._end(request)

    def tokens(self, request: Request) -> Iterator[Token]:
        """Yield the request's tokens as they are made, stepping the engine. Cancels if the caller stops early.

        If the request fails, its error is raised after the tokens made before.
        """
        try:
            while True:
                while request.events:
                    yield request.events.popleft()
                if request.done:
                    break
                self._wait(lambda: request.done or bool(request.events))
        finally:
            self.drop(request)
        request.raise_error()

    def finish(self, requests: Iterable[Request]) -> None:
        """Step until all requests are done, then raise the first error of a request, if any."""
        requests = list(requests)
        left = list(requests)

        def all_done() -> bool:
            while left and left[-1].done:
                left.pop()
            return not left

        try:
            self._wait(all_done)
        finally:
            for request in requests:
                self.cancel(request)
        for request in requests:
            request.raise_error()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Step until `ready()`, or wait while another thread steps, or until pages come."""
        self._turns.wait(ready, self._step_unless, lambda: self.pause() if self._expects else self.pause() or 0)

    def _step_unless(self, ready: Callable[[], bool]) -> bool:
        with self._lock:
            return ready() or self._step()  # a server's thread may step too

    @property
    def _expects(self) -> bool:
        """Whether other threads bring something that a request waits for."""
        return bool(self._loads) or any(choice.errands for choice in self._queues.active)

    def _arrival(self) -> None:
        """Called by other threads when a load or an errand is over."""
        self._turns.tell()
        if (callback := self.on_arrival) is not None:
            callback()

    def pause(self) -> float | None:
        """Seconds until a step may find something to do if nothing else happens; None: not because of pages to come."""
        pauses = self._loads.patience() if self._loads else None, self._placement.pause()
        return min((pause for pause in pauses if pause is not None), default=None)

    def step(self) -> bool:
        """Admit, compute, sample, and hand results to programs. Returns False if there was nothing to do."""
        try:
            with self._lock:
                return self._step()
        finally:
            self._turns.tell()

    def _step(self) -> bool:
        try:
            return self._advance()
        except BaseException as error:  # a mistake here, or a later Ctrl-C: what is in flight is lost
            reason = error if isinstance(error, EngineFailed) else EngineStopped(CUT)
            for request in list(self._requests):
                self._fail({request}, reason)
            raise

    def _advance(self) -> bool:
        began, forecast = self._clock(), self._forecast
        arrived = bool(self._loads) and self._take_arrivals()
        arrived = self._collect() or arrived
        self._admit()
        chunks, failed = self._placement.place(plan(self._queues.running, self.config, self._fits))
        predicted = None if forecast is None else forecast.placed(chunks)
        self.report = StepReport.of(chunks, predicted)
        step, flight = Step(chunks, predicted, began), self._flight
        models = self._compute(chunks)
        if (before := flight.step) is not None:
            self._observe(before, flight.land(self._guarded, began))
        self._give_up(failed)  # now that the tokens before are delivered
        self._resume()
        ready = self._ready()
        worked = bool(chunks or ready or before) or arrived
        if self._in_flight:
            if ready or (models and self._requests):
                flight.launch(step, ready, self._guarded, ahead=True, computing=models)
        else:
            while ready:
                flight.launch(step, ready, self._guarded)
                flight.land(self._guarded, began)
                self._resume()
                ready = self._ready()
            self._observe(step, self._clock() - began)
        if self._loads:
            self._loads.start(self._placement.may_load)
        if (watch := self.watch) is not None and worked:
            watch.step(self, chunks, began)
        return worked

    @property
    def _in_flight(self) -> bool:
        wanted = self.config.in_flight
        return self.models[self.default].backend.asynchronous if wanted is None else wanted

    def _compute(self, chunks: Sequence[Chunk]) -> list[Model]:
        """Launch a forward pass for each model that the chunks need. Returns these models."""
        models = list(dict.fromkeys(chunk.lane.model for chunk in chunks))
        for model in models:
            # Not those whose request has failed since through a sibling choice.
            group = [chunk for chunk in chunks if chunk.lane.model is model and not chunk.lane.choice.done]
            if group:
                requests = {chunk.lane.choice.request for chunk in group}
                self._guarded(requests, run, model, group, self._flight.drawn(model))
        return models

    def _observe(self, step: Step, seconds: float | None) -> None:
        """Correct the forecast by a step that is over, and took so many seconds."""
        if self._forecast is not None and step.predicted is not None and step.chunks and seconds is not None:
            self._forecast.observe(step.chunks, step.predicted, seconds)

    def _give_up(self, failed: Iterable[tuple[Lane, OutOfPages]]) -> None:
        """End what finds no page even alone."""
        for lane, error in failed:
            if lane in lane.choice.lanes:
                if not self._driver.outgrow(lane.choice, lane):
                    self._fail({lane.choice.request}, error)
                self._retire(lane.choice)

    def _fits(self, planned: Plan) -> bool:
        """Whether the planned step is predicted to meet the ITL objective."""
        forecast, itl_ms = self._forecast, self.config.itl_ms
        return forecast is None or itl_ms is None or forecast.planned(planned) <= itl_ms / 1e3

    def _take_arrivals(self) -> bool:
        """Let lanes go on whose loads are over. Returns whether there were any."""
        over = self._loads.over()
        for load in over:
            if not load.done:
                load.give_up()
            lanes, kv = list(load.lanes), load.take()
            if load.model.index is not None and len(load.tokens) and load.error is None:
                load.model.index.insert(kv)
            for lane in lanes:
                choice = lane.choice
                if lane.load is load and not choice.done:
                    self._guarded({choice.request}, self._drive, partial(arrive, lane, load, kv), choice)
                    self._sort(choice)
                    self._retire(choice)
            load.close()
        return bool(over)

    def _collect(self) -> bool:
        """Take what other threads have brought. Returns whether there was anything."""
        collected = [self._driver.collect(choice) for choice in self._queues.active if choice.errands]
        return any(collected)

    def _sort(self, choice: Choice) -> None:
        """Move a choice that has nothing but strokes that wait away from the running."""
        if choice in self._queues.running and choice.arriving:
            self._queues.arrive(choice)

    def _admit(self) -> None:
        queues = self._queues
        for choice in [choice for choice in queues.arriving if not choice.arriving]:
            if len(queues.running) < self.config.max_running:
                queues.run(choice)
        while len(queues.running) < self.config.max_running and (choice := self._placement.next()) is not None:
            queues.run(choice)
            timings = choice.request.timings
            timings.scheduled = self._clock() if timings.scheduled is None else timings.scheduled
            self._guarded({choice.request}, self._drive, self._driver.start, choice)
            self._sort(choice)
            self._retire(choice)

    def _resume(self) -> None:
        """Hand results to waiting programs until none can continue."""
        while waiting := [choice for choice in self._queues.running if choice.has_news]:
            for choice in waiting:
                if not choice.done:  # ended by a sibling's failure
                    self._guarded({choice.request}, self._drive, self._driver.resume, choice)
                    self._sort(choice)
                    self._retire(choice)

    def _drive(self, action: Callable[[Choice], None], choice: Choice) -> None:
        """Run a program to its next strokes. If it runs out of pages, others are preempted and it starts again."""
        try:
            action(choice)
        except OutOfPages as error:
            hopeless = isinstance(error, ContextLengthExceeded) or not self._placement.make_way(choice, error)
            if hopeless and not self._driver.outgrow(choice):
                raise
            error.__traceback__ = None  # where a future has brought it, a frame of it holds it, and all of the step
        for lane in choice.lanes:
            if lane.missing is not None and lane.load is None:
                self._loads.add(lane)

    def _ready(self) -> list[DecodeLane]:
        lanes = (lane for choice in self._queues.running for lane in choice.lanes)
        return [lane for lane in lanes if isinstance(lane, DecodeLane) and lane.ready]

    def _guarded(self, requests: set[Request], action: Callable[..., None], *args: Any) -> None:
        """Call `action` on behalf of requests; an exception ends these requests and no others."""
        try:
            action(*args)
        except EngineFailed:  # nothing can be computed any more
            raise
        except Exception as error:
            if not isinstance(error, TwostrokeError):
                log.exception("a program or a kernel failed")
            self._fail(requests, error)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        # A traceback must not keep KV values alive. A typed error needs no traceback: its message is enough. For
        # other errors the traceback stays readable, with cleared frames.
        if isinstance(error, TwostrokeError):
            error.__traceback__ = None
        traceback.clear_frames(error.__traceback__)
        for request in requests:
            request.error = error
            self._end(request)

    def _end(self, request: Request) -> None:
        request.shared.clear()
        for choice in request.choices:
            if not choice.done:
                choice.finish(None)
            self._retire(choice)

    def _retire(self, choice: Choice) -> None:
        if choice.done:
            request = choice.request
            self._queues.leave(choice)
            if request.done:
                timings = request.timings
                timings.finished = self._clock() if timings.finished is None else timings.finished
                self._requests.discard(request)
                if not self._requests:
                    self._flight.clear()  # nobody may step for a long time
