"""Between the event loop and the engine's thread: who is let in, and who hears of what."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from twostroke.engine.engine import Engine
from twostroke.engine.request import Request
from twostroke.llm import LLM
from twostroke.server.engine_thread import EngineThread, Update
from twostroke.server.errors import ApiError, EngineFailed, Overloaded, ShuttingDown
from twostroke.server.generation import Generation
from twostroke.server.grammar import Grammars
from twostroke.server.metrics import Metrics
from twostroke.server.settings import Settings
from twostroke.server.tracing import Tracer

T = TypeVar("T")


class Service:
    """The model, its engine's thread, and everything in flight.

    All methods belong to the event loop's thread. What takes long and needs no engine (templates, tokenization,
    grammars) runs in a small pool of threads through `prepare`.

    Attributes:
        draining: no new work is taken.
    """

    def __init__(self, llm: LLM, settings: Settings, metrics: Metrics) -> None:
        self.llm, self.settings, self.metrics = llm, settings, metrics
        self.name = settings.model_name or llm.name
        self.created = int(time.time())
        self.grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
        self.draining = False
        self._tracer = Tracer()
        self._in_flight: set[Generation] = set()
        self._taken = 0  # choices in flight
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        self._thread = EngineThread(llm.engine, self._publish, metrics.step)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seconds = 1.0  # that a request takes, a running mean

    # Life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def drain(self, grace_s: float) -> None:
        """Take no new work, and cancel what still runs after so many seconds."""
        self.draining = True
        asyncio.get_running_loop().call_later(grace_s, self._abort_all)

    async def stop(self) -> None:
        """Cancel everything and end the engine's thread."""
        self.draining = True
        self._abort_all()
        await asyncio.to_thread(self._thread.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def alive(self) -> bool:
        return self._thread.alive

    @property
    def failure(self) -> EngineFailed | None:
        return self._thread.failure

    @property
    def in_flight(self) -> int:
        """Choices that wait or run."""
        return self._taken

    # Work -------------------------------------------------------------------------------------------------------

    def reserve(self, choices: int) -> Generation:
        """A place in the queue, to be given back by `close`. Raises ApiError where there is none."""
        if self.failure is not None:
            raise self.failure
        if self.draining:
            raise ShuttingDown
        room = self.llm.engine.config.max_running + self.settings.max_queued
        if choices > min(room, self.settings.max_choices):
            most = min(room, self.settings.max_choices)
            raise ApiError(400, f"n must be such that all prompts ask for {most} answers at most", param="n")
        if self._taken + choices > room:
            self.metrics.rejected("queue_full")
            raise Overloaded(self._retry_after())
        generation = Generation(choices, self._closed)
        self._in_flight.add(generation)
        self._taken += choices
        return generation

    def begin(self, generation: Generation, requests: list[Request], timeout_s: float | None) -> None:
        """Start what was reserved."""
        generation.start(self._thread, requests, timeout_s or self.settings.timeout_s)

    async def prepare(self, action: Callable[[], T]) -> T:
        """Run what needs no engine off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, action)

    async def call(self, action: Callable[[Engine], Any]) -> Any:
        """Run something in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._thread.call(action))

    # Within -----------------------------------------------------------------------------------------------------

    def _publish(self, updates: list[Update]) -> None:
        """Called by the engine's thread: one wake-up of the event loop for all that a step made."""
        if updates and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._dispatch, updates)
            except RuntimeError:  # the loop is closed: nobody is left to hear of it
                return

    def _dispatch(self, updates: list[Update]) -> None:
        for update in updates:
            if update.tokens:
                self.metrics.output_tokens(len(update.tokens))
            if update.done:
                self._finished(update)
            update.job.owner.arrived(update)

    def _finished(self, update: Update) -> None:
        request = update.job.request
        self.metrics.finished(request, update.error)
        self._tracer.record(request, self.name, update.error)
        if update.error is None and not request.cancelled and request.timings.finished is not None:
            self._seconds += 0.2 * (request.timings.finished - request.timings.arrival - self._seconds)

    def _retry_after(self) -> int:
        """Seconds until a place is likely to be free: a running request's share of a request's time, at least 1."""
        return min(60, max(1, math.ceil(self._seconds / max(1, self.llm.engine.num_running))))

    def _abort_all(self) -> None:
        for generation in list(self._in_flight):
            generation.abort(ShuttingDown())

    def _closed(self, generation: Generation) -> None:
        self._in_flight.discard(generation)
        self._taken -= generation.choices
