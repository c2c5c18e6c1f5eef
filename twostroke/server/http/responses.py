"""Bytes to clients: JSON, server-sent events, and noticing that a client has gone."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from twostroke.engine.engine_thread import Update
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.errors import ApiError, to_api_error
from twostroke.server.http.call_log import call_log

log = logging.getLogger(__name__)
T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499  # as nginx has it: nobody reads it, it is for the log


class ClientDisconnected(Exception):
    """The client has closed the connection."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Compact JSON."""
    return Response(to_json(content, inf_nan_mode="null"), status, headers, "application/json")


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The work's result. If the client disconnects first, the work is cancelled and ClientDisconnected raised."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def all_of(updates: AsyncIterable[object]) -> None:
    """Wait for all updates."""
    async for _ in updates:
        pass


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamedResponse(Response, ABC):
    """A body that is sent in pieces as they come, until there are no more or the client goes."""

    def __init__(self, media_type: str) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        # The base class has set the length of its empty body; a stream's length is not known.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    @abstractmethod
    def chunks(self) -> AsyncGenerator[bytes]:
        """The pieces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send(send))
        except ClientDisconnected:
            call_log(scope).client = "gone"

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self.chunks()) as chunks:
            async for data in chunks:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(StreamedResponse):
    """An answer as a stream of events, until it is complete, something fails, or the client goes."""

    def __init__(
        self,
        answer: Answer,
        first: tuple[int, Update],
        rest: AsyncIterator[tuple[int, Update]],
        active_call: ActiveCall,
    ) -> None:
        super().__init__(answer.media_type)
        self._answer, self._first, self._rest, self._active_call = answer, first, rest, active_call
        self._told: dict[str, Any] = {}  # fields that the first event has in addition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._told = call_log(scope).answer_fields
            await super().__call__(scope, receive, send)
        finally:
            self._active_call.close()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """One piece of data for each update, with all of its events."""
        answer = self._answer
        try:
            yield self._join(answer.opening()) + self._tokens(*self._first)
            async for prompt, update in self._rest:
                if data := self._tokens(prompt, update):
                    yield data
            await answer.finish()
            yield self._join(answer.closing())
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
            yield answer.encode(answer.error_event(to_api_error(error)))
        if answer.done_marker:
            yield b"data: [DONE]\n\n"

    def _tokens(self, prompt: int, update: Update) -> bytes:
        return b"".join(self._join(self._answer.events(prompt, token)) for token in update.tokens)

    def _join(self, events: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(self._encode(event) for event in events)

    def _encode(self, event: dict[str, Any]) -> bytes:
        more, self._told = self._told, {}
        return self._answer.encode({**event, **more} if more else event)
