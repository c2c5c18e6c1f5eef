"""The way of every call that generates text: a place in the queue, preparation, the engine, and the answer."""

import time
from collections.abc import AsyncIterator, Callable

from fastapi import Request as HttpRequest
from fastapi import Response

from twostroke.engine.engine_thread import Update
from twostroke.engine.request import Request
from twostroke.server.active_call import ActiveCall, CallOptions
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.http.responses import (
    CLIENT_CLOSED_REQUEST,
    ClientDisconnected,
    EventStream,
    cancel_on_disconnect,
    json_response,
    warnings_field,
)


async def generate(
    http: HttpRequest,
    terms: CallOptions,
    prepare: Callable[[], list[Request]],
    answer_for: Callable[[ActiveCall], Answer],
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
    active_call = engine.reserve_call(terms.choices)
    streaming = False
    try:
        requests = await cancel_on_disconnect(http.receive, engine.run_in_thread(prepare))
        name = http.headers.get("x-request-id", "")[:128]
        for request in requests:
            request.timings.arrival, request.priority, request.name = arrival, terms.priority, name
        engine.submit(active_call, requests, terms.timeout_s)
        answer, updates = answer_for(active_call), active_call.updates()
        http.scope["facts"]["prompt_tokens"] = sum(request.prompt_tokens for request in requests)
        if not terms.stream:
            await cancel_on_disconnect(http.receive, _collect(answer, updates))
            http.scope["facts"]["output_tokens"] = answer.output_tokens
            return json_response(answer.body() | warnings_field(http.scope))
        first = await cancel_on_disconnect(http.receive, anext(updates))
        streaming = True
        return EventStream(answer, first, updates, active_call)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not streaming:
            active_call.close()


async def _collect(answer: Answer, updates: AsyncIterator[tuple[int, Update]]) -> None:
    async for prompt, update in updates:
        for token in update.tokens:
            answer.add_token(prompt, token)
