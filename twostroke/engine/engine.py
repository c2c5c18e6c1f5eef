"""The step loop: all requests share each forward pass."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.concurrency import FairLock, LeaderFollower
from twostroke.engine.forecast import Forecast
from twostroke.engine.guess_judge import GuessJudge
from twostroke.engine.guess_prices import GuessPrices
from twostroke.engine.lane import Lane
from twostroke.engine.load_queue import LoadQueue, measure_stores
from twostroke.engine.model import Model
from twostroke.engine.output import Token
from twostroke.engine.page_budget import PageBudget
from twostroke.engine.placement import Placement
from twostroke.engine.program_runner import ProgramRunner
from twostroke.engine.queues import Queues
from twostroke.engine.request import Choice, Request
from twostroke.engine.request_manager import RequestManager
from twostroke.engine.scheduler import Plan, SchedulerConfig, comfortable_itl_ms, plan
from twostroke.engine.step import Chunk, ScheduledStep, StepReport
from twostroke.engine.step_in_flight import StepInFlight
from twostroke.errors import EngineFailed, EngineStopped
from twostroke.kv.pool import PagePool
from twostroke.kv.tiers.tiers import Tiers
from twostroke.system.process_exit import call_at_exit, stay_if_process_ends

CLOSED = "this model is closed: open it again"
ENDS = "this process is ending: nothing is computed any more"
CUT = "a step of this model was interrupted, so its requests have ended: ask again"


class EngineObserver(Protocol):
    """An observer is told of each step that did something, in the thread that steps."""

    def record(self, engine: "Engine", chunks: Sequence[Chunk], began: float) -> None:
        """Record a step that computed `chunks`, began at time `began`, and is over now. The engine is at rest."""
        ...


class Engine:
    """Runs requests over one or more models.

    A caller that waits for tokens steps, and a step serves every request. Any number of threads may wait: one of them
    steps at a time, and the others wait for what it brings. Programs run in whichever thread steps. Setting an ITL
    objective calibrates the models first, which takes about a second each.

    Attributes:
        models: by role, the name that programs use; one model may have several roles.
        on_arrival: called by an I/O thread when pages have come that a request waits for.
        observer: told of each step; None while nobody watches. Any thread may set it.
        before_step: told what a step computes before it does, in the thread that steps; None: nobody is.
        lock: held for every change of the engine's state.
        budget, programs, placement, flight, requests: its parts.
        forecast: what steps are predicted by, once it is calibrated.
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
        self.lock = FairLock()  # held for every change of the engine's state
        self._waiters = LeaderFollower()
        self.on_arrival: Callable[[], None] | None = None
        self.observer: EngineObserver | None = None
        self.before_step: Callable[[Sequence[Chunk]], None] | None = None
        self._closed = False
        self._clock, self.forecast = clock, forecast
        self.tiers = tiers or Tiers()  # where pages may be besides the pools
        arrival = weakref.WeakMethod(self._arrival)  # no cycle: a dropped engine is gone at once

        def wake() -> None:
            if (called := arrival()) is not None:
                called()

        self._queues = Queues()
        self.loads = LoadQueue(self.tiers, wake, clock)
        self.budget = PageBudget(dict.fromkeys(self.models.values()), self.loads)
        self.config = config or SchedulerConfig()
        calibrate, queues = weakref.WeakMethod(self._calibrate), self._queues

        def forecast_now() -> Forecast:
            called = calibrate()
            assert called is not None, "an engine that steps is there"
            return called()

        self._judge = GuessJudge(
            GuessPrices(forecast_now), self.budget, lambda: max(1, sum(1 for one in queues.running if one.output.ids))
        )
        self.programs = ProgramRunner(self.models, default, self._judge, wake, clock)
        self.placement = Placement(self.budget, self._queues, self.programs.index_computed, clock)
        self.flight = StepInFlight(self.placement, clock)
        idle = self.flight.clear  # nobody may step for a long time
        self.requests = RequestManager(self._queues, self.programs, self.placement, self.loads, idle, clock)
        if self.tiers.stores:
            measure_stores(self._calibrate(), self.config.max_step_tokens)
        self.report = StepReport()  # the tokens that the last step computed
        call_at_exit(self._end_with_process)

    @property
    def config(self) -> SchedulerConfig:
        """Limits of a step. It may be replaced between steps."""
        return self._config

    @config.setter
    def config(self, config: SchedulerConfig) -> None:
        with self.lock:
            if config.itl_ms is not None:
                self._calibrate()
            self._config, self.budget.max_chunk = config, config.max_step_tokens

    def _calibrate(self) -> Forecast:
        """Forecasts of steps; the first call times the models. The caller holds the lock."""
        if self.forecast is None:
            self.forecast = Forecast.calibrated(self.models.values())
        return self.forecast

    def choose_itl(self) -> None:
        """Set an ITL objective by what a decode step costs here (`engine/scheduler.py`)."""
        with self.lock:
            step_s = self._calibrate().decode_step(self.models[self.default])
        self.config = replace(self.config, itl_ms=comfortable_itl_ms(step_s))

    def prefill_seconds(self, model: Model) -> Callable[[int, int], float]:
        """Predicts the seconds to compute tokens of one prompt alone: (entries before, tokens).

        The first call calibrates the models, unless that is done.
        """
        with self.lock:
            return self._calibrate().prefill(model, self.config.max_step_tokens)

    # What others look at ----------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self.requests)

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
        return self.budget.cached_pages(pool)

    @property
    def failure(self) -> EngineFailed | None:
        """Why nothing can be computed any more: a rank of a backend is lost."""
        return next((found for model in self.models.values() if (found := model.backend.failure) is not None), None)

    @property
    def preemptions(self) -> int:
        """Number of times that a choice was preempted."""
        return self.placement.preemptions

    @property
    def evicted_pages(self) -> int:
        """Number of times that a page of a prefix index had to give up its frame."""
        return self.budget.evicted_pages

    # Requests, of any thread ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Request:
        """Queue a request. Raises EngineStopped after `close`."""
        try:
            with self.lock:
                if self._closed:
                    raise EngineStopped(CLOSED)
                self.requests.add(request)
            self._waiters.notify()
        except BaseException:  # also Ctrl-C, which comes when the lock is released
            stay_if_process_ends()
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
        if self.lock.mine:  # called by a program or by a callback of a step
            self.requests.cancel(request)
            return
        try:
            with self.lock:
                self.requests.cancel(request)
        finally:
            self._waiters.notify()

    def drop(self, request: Request) -> None:
        """`cancel` for finalizers: at once if no step is running, else after it. Never waits."""
        if not request.done and not request.is_garbage:
            self.lock.defer(lambda: self.requests.cancel(request))

    def close(self) -> None:
        """End every request with EngineStopped, take no more, close the tiers, and drop the prefix indexes."""
        try:
            with self.lock:
                self._closed = True
                for request in self.requests:
                    self.requests.fail({request}, EngineStopped(CLOSED))
            self.tiers.close()  # first: what waits to be written is in the indexes
            with self.lock:
                self.budget.close()
        finally:
            self._waiters.notify()

    def _end_with_process(self) -> None:
        """End every request once the step in flight is over: no kernel may run while Python frees what it reads.

        Daemon threads that wait for a request, or submit another one, stay where they are until the process is gone. If
        another exit function waits for them, they get EngineStopped in the end (`stay_if_process_ends`).
        """
        with self.lock:
            self._closed = True
            self.requests.fail(self.requests, EngineStopped(ENDS))

    def tokens(self, request: Request) -> Iterator[Token]:
        """Yield the request's tokens as they are made, stepping the engine. Cancels if the caller stops early.

        If the request fails, its error is raised after the tokens made before.
        """
        try:
            # No loop here: in CPython 3.12 and 3.13 a `try` does not cover its way back, and Ctrl-C may come there.
            yield from self._tokens(request)
        finally:
            self.drop(request)
        request.raise_error()

    def _tokens(self, request: Request) -> Iterator[Token]:
        while True:
            while request.events:
                yield request.events.popleft()
            if request.done:
                return
            self._wait(lambda: request.done or bool(request.events))

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
        self._waiters.wait(ready, self._step_unless, self._pause)
        stay_if_process_ends()

    def _pause(self) -> float | None:
        """Seconds to wait after a step without work; None: until another thread brings something."""
        return self.idle_timeout() or (None if self.requests.awaiting_threads else 0)

    def _step_unless(self, ready: Callable[[], bool]) -> bool:
        with self.lock:
            return ready() or self._step()  # a server's thread may step too

    def _arrival(self) -> None:
        """Called by other threads when a load or an errand is over."""
        self._waiters.notify()
        if (callback := self.on_arrival) is not None:
            callback()

    def idle_timeout(self) -> float | None:
        """Seconds until a step may find something to do if nothing else happens; None: not because of pages to come."""
        pauses = self.loads.next_deadline() if self.loads.busy else None, self.placement.shortages.retry_after()
        return min((pause for pause in pauses if pause is not None), default=None)

    # The step ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit, compute, sample, and hand results to programs. Returns False if there was nothing to do."""
        try:
            with self.lock:
                return self._step()
        finally:
            self._waiters.notify()
            stay_if_process_ends()

    def _step(self) -> bool:
        try:
            return self._advance()
        except BaseException as error:  # a mistake here, or a later Ctrl-C: what is in flight is lost
            self.requests.fail(self.requests, error if isinstance(error, EngineFailed) else EngineStopped(CUT))
            raise

    def _advance(self) -> bool:
        began, requests, flight = self._clock(), self.requests, self.flight
        arrived = requests.collect_arrivals()
        requests.admit(self.config.max_running)
        if self._judge.asked:
            self._judge.guess(self._queues.running)
        chunks, failed = self.placement.place(plan(self._queues.running, self.config, self._fits))
        step = ScheduledStep(chunks, self._predicted(chunks), began)
        self.report = StepReport.of(step)
        if (told := self.before_step) is not None:
            told(chunks)
        models = flight.launch_forward(chunks, requests.guarded)
        if (before := flight.step) is not None:
            self._observe(before, flight.collect_tokens(requests.guarded, began))
        requests.end_without_pages(failed)  # now that the tokens before are delivered
        requests.resume_programs()
        ready = requests.ready
        worked = bool(chunks or ready or before) or arrived
        if self._in_flight:
            if ready or (models and requests):
                flight.launch_sampling(step, ready, requests.guarded, ahead=True, computing=models)
        else:
            while ready:
                flight.launch_sampling(step, ready, requests.guarded)
                flight.collect_tokens(requests.guarded, began)
                requests.resume_programs()
                ready = requests.ready
            self._observe(step, self._clock() - began)
        if self.loads.busy:
            self.loads.start(self.placement.may_load)
        if (observer := self.observer) is not None and worked:
            observer.record(self, chunks, began)
        return worked

    @property
    def _in_flight(self) -> bool:
        wanted = self.config.in_flight
        return self.models[self.default].backend.asynchronous if wanted is None else wanted

    def _predicted(self, chunks: Sequence[Chunk]) -> float | None:
        """Seconds of a placed step. Only an ITL objective and tiers want predictions that follow the machine."""
        wanted = self.config.itl_ms is not None or self.tiers.stores
        return self.forecast.placed(chunks) if wanted and self.forecast is not None else None

    def _observe(self, step: ScheduledStep, seconds: float | None) -> None:
        """Correct forecasts by a step that is over, and took so many seconds."""
        if self.forecast is None or not step.chunks or seconds is None:
            return
        self._judge.observe(step.chunks, seconds)
        if step.predicted is not None:
            self.forecast.observe(step.chunks, step.predicted, seconds)

    def _fits(self, planned: Plan) -> bool:
        """Whether the planned step is predicted to meet the ITL objective."""
        forecast, itl_ms = self.forecast, self.config.itl_ms
        return forecast is None or itl_ms is None or forecast.planned(planned) <= itl_ms / 1e3
