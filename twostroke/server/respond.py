"""The way of every generating request: a place in the queue, preparation, the engine, and the answer."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from twostroke.engine.request import Request
from twostroke.server.answers.answer import Answer
from twostroke.server.engine_thread import Update
from twostroke.server.errors import ApiError, from_engine
from twostroke.server.generation import Generation
from twostroke.server.schemas.common import Generating
from twostroke.server.service import Service

log = logging.getLogger(__name__)
T = TypeVar("T")
CLIENT_GONE = 499  # nobody reads it; the log does


class ClientGone(Exception):
    """Nobody is left to answer."""


async def respond(
    http: HttpRequest,
    body: Generating,
    prompts: int,
    prepare: Callable[[], list[Request]],
    make: Callable[[Generation], Answer],
) -> Response:
    """Generate and answer. Everything is cancelled the moment the client goes.

    `prepare` makes the engine's requests, off the event loop; `make` the answer that their tokens go into. A stream
    begins with the first token, so what fails before it is answered with a status of its own.
    """
    service: Service = http.app.state.service
    arrival = time.perf_counter()
    generation = service.reserve(prompts * body.n)
    streaming = False
    try:
        requests = await unless_gone(http.receive, service.prepare(prepare))
        for request in requests:
            request.timings.arrival, request.priority = arrival, body.priority
        service.begin(generation, requests, body.timeout)
        answer, updates = make(generation), generation.updates()
        http.scope["facts"]["prompt_tokens"] = sum(request.prompt_tokens for request in requests)
        if not body.stream:
            await unless_gone(http.receive, _collect(answer, updates))
            http.scope["facts"]["output_tokens"] = answer.output_tokens
            return json_response(answer.whole())
        first = await unless_gone(http.receive, anext(updates))
        streaming = True
        return EventStream(answer, first, updates, generation)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        if not streaming:
            generation.close()


async def _collect(answer: Answer, updates: AsyncIterator[tuple[int, Update]]) -> None:
    async for place, update in updates:
        for token in update.tokens:
            answer.keep(place, token)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The work's result. If the client goes first, the work is cancelled and ClientGone raised."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Compact JSON."""
    return Response(to_json(content), status, headers, "application/json")


class EventStream(Response):
    """Server-sent events, until all is told, something fails, or the client goes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        first: tuple[int, Update],
        rest: AsyncIterator[tuple[int, Update]],
        generation: Generation,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # A stream's length is not known, though the base class has counted its empty body.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._answer, self._first, self._rest, self._generation = answer, first, rest, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._tell(send))
        except ClientGone:
            scope["facts"]["client"] = "gone"
        finally:
            self._generation.close()
            scope["facts"]["output_tokens"] = self._answer.output_tokens

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """One piece of data for each update, however many events are in it."""
        answer = self._answer
        try:
            yield self._join(answer.opening()) + self._tokens(*self._first)
            async for place, update in self._rest:
                if data := self._tokens(place, update):
                    yield data
            yield self._join(answer.closing())
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
            yield answer.encode(answer.failed(from_engine(error)))
        if answer.done_marker:
            yield b"data: [DONE]\n\n"

    def _tokens(self, place: int, update: Update) -> bytes:
        return b"".join(self._join(self._answer.chunks(place, token)) for token in update.tokens)

    def _join(self, events: Any) -> bytes:
        return b"".join(map(self._answer.encode, events))
