"""The engine as the event loop sees it: admission, start and end of calls, and updates on their way to them."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest
from prometheus_client.core import Metric

from twostroke.api.llm import LLM
from twostroke.api.reasoning.reasoning import Reasoning
from twostroke.engine.engine import Engine
from twostroke.engine.engine_thread import Update
from twostroke.engine.request import Request
from twostroke.errors import EngineStopped, InvalidRequest
from twostroke.server.active_call import ActiveCall
from twostroke.server.body_validation.supervisor import BodyValidator, WorkerState
from twostroke.server.engine_process.hollow import HollowState
from twostroke.server.errors import ApiError, ShuttingDown, to_api_error
from twostroke.server.grammar import Grammars, json_schema
from twostroke.server.observability.metrics import Metrics, engine_families, join_families
from twostroke.server.observability.tracing import record_spans
from twostroke.server.served_engine import ServedEngine
from twostroke.server.settings import Settings

T = TypeVar("T")


class AsyncEngine:
    """A served model, its engine's thread, and every call in flight.

    All methods belong to the event loop's thread. What takes long and needs no engine (templates, tokenization,
    grammars) runs in a small pool of threads, by `run_in_thread`.

    Attributes:
        served: the engine itself, with its replicas.
        reasoning: how the model writes thoughts before its answers; None if it does not set them apart.
        body_validator: validates long bodies in another process.
        leaving: new work is still taken, but should be sent elsewhere: the server drains soon.
        draining: no new work is taken.
        max_running: most choices that run at once, of all replicas.
    """

    def __init__(self, served: ServedEngine, settings: Settings, metrics: Metrics) -> None:
        llm = served.llm
        self.served, self.llm, self.settings, self.metrics = served, llm, settings, metrics
        self.name = settings.model_name or llm.name  # what clients call the model
        self.created = int(time.time())  # when serving began, in seconds since 1970
        self.max_running = len(served.parts) * llm.engine.config.max_running
        self.grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
        self.reasoning = Reasoning.of(llm.tokenizer, llm.config.vocab_size, settings.reasoning_parser)
        self.body_validator = BodyValidator(
            lambda: WorkerState(HollowState.of(llm), settings, self.name, self.created, self.max_running)
        )
        self.leaving = self.draining = False
        self.output_tokens = 0  # how many were made so far
        self._active_calls: set[ActiveCall] = set()
        self._choices_in_flight = 0  # choices in flight
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="server")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mean_request_s = 1.0  # mean duration of a request, updated with each one
        self._families: dict[int, list[Metric]] = {}  # of each replica

    # Start and end ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.served.start(self._publish, self.metrics.step)
        self.metrics.watch_steps(lambda: self.served.step_age_s)

    def warm_up(self) -> None:
        """Prepare what the first calls would wait for: the tokenizer's form for grammars and
        the body validation worker.

        Both take the interpreter's lock for a part of a second, in which streams would stand still.
        """
        self.body_validator.start()
        with contextlib.suppress(InvalidRequest):  # a model without an end token has no grammars
            self.grammars.compile(json_schema({"type": "object"}))

    def drain(self, grace_s: float) -> None:
        """Take no new work, and cancel what still runs after `grace_s` seconds."""
        self.draining = True
        asyncio.get_running_loop().call_later(grace_s, self._abort_all)

    async def stop(self) -> None:
        """Cancel everything and end the engine's thread."""
        self.draining = True
        self._abort_all()
        await asyncio.to_thread(self.served.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.body_validator.stop)

    @property
    def failure(self) -> ApiError | None:
        return None if self.served.failure is None else to_api_error(self.served.failure)

    @property
    def lost(self) -> bool:
        """Whether the engine has failed, as where a rank is lost, so that only another process can serve the model."""
        return self.served.failure is not None

    @property
    def hung(self) -> bool:
        """Whether a step takes so long that no new work should be sent here."""
        served = self.served
        return served.alive and not served.restarting and served.step_age_s > self.settings.step_timeout_s

    @property
    def ready(self) -> bool:
        """Whether new work should be sent here."""
        return self.served.alive and not (self.leaving or self.draining or self.hung or self.served.restarting)

    @property
    def in_flight(self) -> int:
        """Choices that wait or run."""
        return self._choices_in_flight

    # Work -------------------------------------------------------------------------------------------------------------

    def reserve_call(self, choices: int) -> ActiveCall:
        """A call with places in the queue, which its `close` gives back. Raises ApiError where there is none."""
        if self.failure is not None:
            raise self.failure
        if self.draining:
            raise ShuttingDown
        room = self.max_running + self.settings.max_queued
        if choices > min(room, self.settings.max_choices):
            most = min(room, self.settings.max_choices)
            raise ApiError(400, f"n must be such that all prompts together ask for at most {most} answers", param="n")
        if self._choices_in_flight + choices > room:
            self.metrics.rejected("queue_full")
            wait = self._retry_after()
            message = f"the server is busy: try again in {wait} s"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": str(wait)})
        active_call = ActiveCall(choices, self._closed)
        self._active_calls.add(active_call)
        self._choices_in_flight += choices
        return active_call

    def submit(self, active_call: ActiveCall, requests: list[Request], timeout_s: float | None) -> None:
        """Start what was reserved."""
        active_call.start(self.served, requests, timeout_s or self.settings.timeout_s)

    async def run_in_thread(self, action: Callable[[], T]) -> T:
        """Run what needs no engine in another thread than the event loop's, as a part of the same call."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, action)

    async def between_steps(self, action: Callable[[Engine], Any], replica: int | None = None) -> Any:
        """Run a function of a module, or a `partial` of one, in the engine's thread, between two steps.

        Without the number of a replica it is one that has the values which the function is given, or any.
        """
        return await self._outcome(lambda: self._part(replica).call(action))

    async def beside_steps(self, action: Callable[[LLM], Any], replica: int | None = None) -> Any:
        """Run such a function, which takes long, where the engine is, while steps go on."""
        return await self._outcome(lambda: self._part(replica).beside_steps(action))

    async def everywhere(self, action: Callable[[Any], Any], *, between_steps: bool = False) -> list[Any]:
        """Run such a function at each replica that is there. Returns all results."""
        run = self.between_steps if between_steps else self.beside_steps
        parts = self.served.parts
        there = [i for i, one in enumerate(parts) if len(parts) == 1 or (one.alive and not one.restarting)]
        return [await run(action, i) for i in there]

    async def families(self) -> list[Metric]:
        """What is measured where the engine is, with the label `replica` if there are several; of one that is not
        there, what was read last."""
        for i, one in enumerate(self.served.parts):
            if one.alive and not one.restarting:
                with contextlib.suppress(ApiError):
                    self._families[i] = await self.beside_steps(engine_families, i)
        if len(self.served.parts) == 1:
            return self._families.get(0, [])
        joined: dict[str, Metric] = {}
        for i, families in sorted(self._families.items()):
            join_families(joined, families, {"replica": str(i)})
        return list(joined.values())

    def _part(self, replica: int | None) -> ServedEngine:
        return self.served if replica is None else self.served.parts[replica]

    async def _outcome(self, begin: "Callable[[], Future[Any]]") -> Any:
        try:
            return await asyncio.wrap_future(begin())
        except EngineStopped as error:
            raise to_api_error(error) from None

    def require_engine_process(self) -> None:
        """A route calls this before it reads what the server keeps in memory, such as stored answers.

        The body validation worker has none of it, so there the call ends here and passes.
        """

    # Inside -----------------------------------------------------------------------------------------------------------

    def _publish(self, updates: list[Update]) -> None:
        """Called by the engine's thread: one wake-up of the event loop for all updates of a step."""
        if updates and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._dispatch, updates)
            except RuntimeError:  # the loop is closed, and every call with it
                return

    def _dispatch(self, updates: list[Update]) -> None:
        for update in updates:  # first, so that no call waits for ever where another cannot be counted
            update.owner.report(update)
        for update in updates:
            if update.tokens:
                self.output_tokens += len(update.tokens)
                self.metrics.output_tokens(len(update.tokens))
            if update.done:
                self._finished(update)

    def _finished(self, update: Update) -> None:
        request = update.request
        self.metrics.finished(request, update.error)
        record_spans(self.name, request, update.owner.trace, update.error, update.owner.abort_reason)
        if update.error is None and not request.cancelled and request.timings.finished is not None:
            self._mean_request_s += 0.2 * (request.timings.finished - request.timings.arrival - self._mean_request_s)

    def _retry_after(self) -> int:
        """Seconds until a place is likely to be free: a request's mean duration / those running, at least 1."""
        running = min(self._choices_in_flight, self.max_running)
        return min(60, max(1, math.ceil(self._mean_request_s / max(1, running))))

    def _abort_all(self) -> None:
        for active_call in list(self._active_calls):
            active_call.abort(ShuttingDown())

    def _closed(self, active_call: ActiveCall) -> None:
        self._active_calls.discard(active_call)
        self._choices_in_flight -= active_call.choices


async def current_engine(http: HttpRequest) -> AsyncEngine:
    """The engine of the application that has been called."""
    return http.app.state.engine


CurrentEngine = Annotated[AsyncEngine, Depends(current_engine)]  # a parameter of routes
