"""All requests of an engine: admits their choices, resumes their programs, and ends them.

What a program or a kernel raises ends the requests on whose behalf it ran, and no others.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from twostroke.engine.choice_state import ARRIVING, DONE, RUNNING, WAITING
from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.lane import Lane
from twostroke.engine.load_queue import LoadQueue, resume_lane
from twostroke.engine.placement import Placement
from twostroke.engine.program_runner import ProgramRunner
from twostroke.engine.queues import Queues
from twostroke.engine.request import Choice, Request
from twostroke.errors import ContextLengthExceeded, EngineFailed, OutOfPages, TwostrokeError

log = logging.getLogger(__name__)


class RequestManager:
    """The requests that have not ended. Methods are called under the engine's lock."""

    def __init__(
        self,
        queues: Queues,
        programs: ProgramRunner,
        placement: Placement,
        loads: LoadQueue,
        idle: Callable[[], None],
        clock: Clock = SYSTEM,
    ) -> None:
        """`idle` is called when the last request has ended."""
        self._queues, self._programs, self._placement, self._loads = queues, programs, placement, loads
        self._idle, self._clock = idle, clock
        self._open: set[Request] = set()  # keeps them alive: choices hold weak references

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._open))  # a request that ends on the way is taken out

    @property
    def awaiting_threads(self) -> bool:
        """Whether a request waits for something that another thread brings."""
        return self._loads.busy or any(choice.futures for choice in self._queues.active)

    @property
    def ready(self) -> list[tuple[Choice, DecodeLane]]:
        """Lanes with rows to sample from, with their choices."""
        lanes = [(choice, lane) for choice in self._queues.running for lane in choice.lanes]
        return [(choice, lane) for choice, lane in lanes if isinstance(lane, DecodeLane) and lane.ready]

    def add(self, request: Request) -> None:
        """Queue a request's choices."""
        self._open.add(request)
        for choice in request.choices:
            self._queues.move(choice, WAITING)

    def admit(self, most: int) -> None:
        """Start choices for which there is room, while fewer than `most` run."""
        queues = self._queues
        for choice in [choice for choice in queues.arriving if not choice.arriving]:
            if len(queues.running) < most:
                queues.move(choice, RUNNING)
        while len(queues.running) < most and (choice := self._placement.next_to_admit()) is not None:
            queues.move(choice, RUNNING)
            timings = choice.request.timings
            timings.scheduled = self._clock() if timings.scheduled is None else timings.scheduled
            self._continue(choice, self._programs.start)

    def collect_arrivals(self) -> bool:
        """Take what other tiers and other threads have brought. Returns whether there was anything."""
        loaded = self._loads.busy and self._take_loads()
        brought = [self._programs.collect_futures(choice) for choice in self._queues.active if choice.futures]
        return loaded or any(brought)

    def _take_loads(self) -> bool:
        """Resume the lanes whose loads are over. Returns whether there were any."""
        over = self._loads.pop_finished()
        for load in over:
            if not load.done:
                load.abandon()
            waiting, kv = load.waiting, load.take()
            if load.model.index is not None and len(load.tokens) and load.error is None:
                load.model.index.insert(kv)
            for choice, lane in waiting:
                if lane.on_close is not None:  # else closed meanwhile
                    self._continue(choice, partial(resume_lane, lane, load, kv))
            load.close()
        return bool(over)

    def resume_programs(self) -> None:
        """Hand results to waiting programs until none can continue."""
        while waiting := [choice for choice in self._queues.running if choice.has_news]:
            for choice in waiting:
                if not choice.done:  # ended by a sibling's failure
                    self._continue(choice, self._programs.resume)

    def _continue(self, choice: Choice, action: Callable[[Choice], None]) -> None:
        """Advance a choice by `action`. It leaves the running if all of its strokes wait, or if it is done."""
        self.guarded({choice.request}, self._drive, action, choice)
        if choice.state is RUNNING and choice.arriving:
            self._queues.move(choice, ARRIVING)
        self._retire(choice)

    def _drive(self, action: Callable[[Choice], None], choice: Choice) -> None:
        """Run a program to its next strokes. If it runs out of pages, others are preempted and it starts again."""
        try:
            action(choice)
        except OutOfPages as error:
            # Its frames hold values, whose pages would not come back; where a future has brought it, all of the step.
            error.__traceback__ = None
            hopeless = isinstance(error, ContextLengthExceeded) or not self._placement.preempt_for(choice, error)
            if hopeless and not self._end_with_length(choice):
                raise
        for lane in choice.lanes:
            if lane.missing is not None and lane.on_close is None:
                self._loads.add(choice, lane)

    # Ends -------------------------------------------------------------------------------------------------------

    def guarded(self, requests: set[Request], action: Callable[..., None], *args: Any) -> None:
        """Call `action` on behalf of requests; an exception ends these requests and no others.

        Raises EngineFailed: nothing can be computed any more.
        """
        try:
            action(*args)
        except EngineFailed:
            raise
        except Exception as error:
            if not isinstance(error, TwostrokeError):
                log.exception("a program or a kernel failed")
            self.fail(requests, error)

    def end_without_pages(self, failed: Iterable[tuple[Choice, Lane, OutOfPages]]) -> None:
        """End the choices that found no page even alone."""
        for choice, lane, error in failed:
            if lane in choice.lanes:
                if not self._end_with_length(choice, lane):
                    self.fail({choice.request}, error)
                self._retire(choice)

    def _end_with_length(self, choice: Choice, lane: Lane | None = None) -> bool:
        """See `ProgramRunner`. A choice that could do with fewer pages starts again first."""
        if choice.spare_pages():
            self._placement.preempt(choice)
            return True
        return self._programs.end_with_length(choice, lane)

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        # A traceback must not keep KV values alive. A typed error needs no traceback: its message is enough. For
        # other errors the traceback stays readable, with cleared frames.
        if isinstance(error, TwostrokeError):
            error.__traceback__ = None
        traceback.clear_frames(error.__traceback__)
        for request in requests:
            request.error = error
            self._end(request)

    def cancel(self, request: Request) -> None:
        """End a request and free its pages."""
        if not request.done:
            request.cancelled = True
            self._end(request)

    def _end(self, request: Request) -> None:
        request.shared_prefills.clear()
        for choice in request.choices:
            if not choice.done:
                choice.finish(None)
            self._retire(choice)

    def _retire(self, choice: Choice) -> None:
        if choice.done:
            request = choice.request
            if choice.state is not DONE:
                self._queues.move(choice, DONE)
            if request.done:
                request.shared_prefills.clear()  # one that was made again for siblings that had theirs
                timings = request.timings
                timings.finished = self._clock() if timings.finished is None else timings.finished
                self._open.discard(request)
                if not self._open:
                    self._idle()
