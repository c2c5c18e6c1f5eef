"""Bytes to clients: JSON, server-sent events, and noticing that a client has gone."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from twostroke.engine.engine_thread import Update
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


def raw_response(
    status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, *, with_body: bool = True
) -> bytes:
    """An HTTP/1.1 response, after which the connection is closed; a HEAD is answered without body."""
    content = to_json(body)
    named = {**(headers or {}), "content-type": "application/json", "content-length": str(len(content))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}connection: close\r\n\r\n"
    return head.encode() + (content if with_body else b"")


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


async def gone(_: object, __: Exception) -> Response:
    """The response for a call whose client has disconnected."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class StreamedResponse(Response):
    """A body that is sent in pieces as they come, until there are no more or the client goes."""

    def __init__(
        self, chunks: AsyncGenerator[bytes], media_type: str, close: Callable[[], None] = lambda: None
    ) -> None:
        """`close` is called at the end, however it comes."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        # The base class has set the length of its empty body; a stream's length is not known.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._chunks, self._close = chunks, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send(send))
        except ClientDisconnected:
            call_log(scope).client = "gone"
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._chunks):
            async for data in self._chunks:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer_stream(
    answer: Answer, first: tuple[int, Update], rest: AsyncIterator[tuple[int, Update]], told: dict[str, Any]
) -> AsyncGenerator[bytes]:
    """An answer as events, one piece for each update with all of its events, until it is complete or something fails.

    `told`: fields that the first event has in addition.
    """

    def joined(events: Iterable[dict[str, Any]]) -> bytes:
        nonlocal told
        data = b""
        for event in events:
            data += answer.encode({**event, **told} if told else event)
            told = {}
        return data

    def of_update(prompt: int, update: Update) -> bytes:
        return b"".join(joined(answer.events(prompt, token)) for token in update.tokens)

    try:
        yield joined(answer.opening()) + of_update(*first)
        async for prompt, update in rest:
            if data := of_update(prompt, update):
                yield data
        await answer.finish()
        yield joined(answer.closing())
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("a stream failed")
        yield answer.encode(answer.error_event(to_api_error(error)))
    if answer.done_marker:
        yield b"data: [DONE]\n\n"
