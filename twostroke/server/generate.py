"""The way of every call that generates text: a place in the queue, preparation, the engine, and the answer."""

import time
from collections.abc import AsyncIterator, Callable

from fastapi import Request as HttpRequest
from fastapi import Response

from twostroke.engine.request import Request
from twostroke.engine.thread import Update
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.exchange import Exchange, Terms
from twostroke.server.http.transport import (
    CLIENT_GONE,
    ClientGone,
    EventStream,
    json_response,
    unless_gone,
    warnings_field,
)


async def generate(
    http: HttpRequest,
    terms: Terms,
    prepare: Callable[[], list[Request]],
    answer_for: Callable[[Exchange], Answer],
) -> Response:
    """Generate and answer. If the client disconnects, everything is cancelled at once.

    Args:
        http: the call.
        terms: how it is to be served.
        prepare: makes the engine's requests. It runs off the event loop.
        answer_for: makes the answer that their tokens go into.

    A stream begins with the first token, so an error before it is answered with an HTTP status.
    """
    engine: AsyncEngine = http.app.state.engine
    arrival = time.perf_counter()
    exchange = engine.reserve(terms.choices)
    streaming = False
    try:
        requests = await unless_gone(http.receive, engine.aside(prepare))
        name = http.headers.get("x-request-id", "")[:128]
        for request in requests:
            request.timings.arrival, request.priority, request.name = arrival, terms.priority, name
        engine.begin(exchange, requests, terms.timeout_s)
        answer, updates = answer_for(exchange), exchange.updates()
        http.scope["facts"]["prompt_tokens"] = sum(request.prompt_tokens for request in requests)
        if not terms.stream:
            await unless_gone(http.receive, _collect(answer, updates))
            http.scope["facts"]["output_tokens"] = answer.output_tokens
            return json_response(answer.whole() | warnings_field(http.scope))
        first = await unless_gone(http.receive, anext(updates))
        streaming = True
        return EventStream(answer, first, updates, exchange)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        if not streaming:
            exchange.close()


async def _collect(answer: Answer, updates: AsyncIterator[tuple[int, Update]]) -> None:
    async for prompt, update in updates:
        for token in update.tokens:
            answer.keep(prompt, token)
