"""The way of every call that generates text: a place in the queue, preparation, the engine, and the answer."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response

from twostroke.api.receipts import Receipt
from twostroke.engine.engine_thread import Update
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.server.active_call import ActiveCall, CallOptions
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.engine_requests import Prepared
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import (
    StreamedResponse,
    all_of,
    answer_stream,
    cancel_on_disconnect,
    json_response,
)
from twostroke.server.tenants.tenant import tenant_call

P = TypeVar("P", bound=Prepared)


async def generate(
    http: HttpRequest, options: CallOptions, prepare: Callable[[], P], answer_for: Callable[[P, ActiveCall], Answer]
) -> Response:
    """Generate and answer. If the client disconnects, everything is cancelled at once (ClientDisconnected).

    Args:
        http: the call.
        options: how it is to be served.
        prepare: makes the engine's requests. It runs off the event loop.
        answer_for: makes the answer that takes their tokens.

    A stream begins with the first token, so an error before it is answered with an HTTP status.
    """
    engine: AsyncEngine = http.app.state.engine
    log = call_log(http.scope)
    with ExitStack() as ends:
        active_call = ends.enter_context(engine.reserve_call(options.choices))
        prepared = await _begin(http, active_call, options, prepare)
        answer, updates = answer_for(prepared, active_call), active_call.updates()
        if prepared.receipt:
            answer.on_finish.append(lambda: _receipts_of(engine, prepared, answer.tokens))
        log.model = answer.model
        active_call.trace.operation, active_call.trace.response_id = answer.operation, answer.id or None
        if not options.stream:
            await cancel_on_disconnect(http.receive, _collect(answer, updates))
            return json_response(answer.body() | log.answer_fields)
        first = await cancel_on_disconnect(http.receive, anext(updates))
        ends.pop_all()  # the stream closes the call
        chunks = answer_stream(answer, first, updates, log.answer_fields)
        return StreamedResponse(chunks, answer.media_type, active_call.close)


async def run_request(
    http: HttpRequest, active_call: ActiveCall, options: CallOptions, prepare: Callable[[], Prepared]
) -> Request:
    """Run one request that makes no token to its end. Raises ApiError or ClientDisconnected."""
    prepared = await _begin(http, active_call, options, prepare)
    await cancel_on_disconnect(http.receive, all_of(active_call.updates()))
    return prepared.requests[0]


async def _begin(http: HttpRequest, active_call: ActiveCall, options: CallOptions, prepare: Callable[[], P]) -> P:
    """Prepare the requests of a call, and hand them to the engine."""
    engine: AsyncEngine = http.app.state.engine
    log, arrival = call_log(http.scope), time.perf_counter()
    prepared = await cancel_on_disconnect(http.receive, engine.run_in_thread(prepare))
    log.warn(prepared.warnings)
    log.leave_out(prepared.left_out)
    name = http.headers.get("x-request-id", "")[:128]
    for request in prepared.requests:
        request.timings.arrival, request.priority, request.name = arrival, options.priority, name
    tenant_call.get().reserve(prepared.requests, engine.llm.max_model_len)
    log.requests = prepared.requests
    engine.submit(active_call, prepared.requests, options.timeout_s)
    return prepared


async def _collect(answer: Answer, updates: AsyncIterator[tuple[int, Update]]) -> None:
    async for prompt, update in updates:
        for token in update.tokens:
            answer.add_token(prompt, token)
    await answer.finish()


async def _receipts_of(
    engine: AsyncEngine, prepared: Prepared, answers: Mapping[tuple[int, int], Sequence[Token]]
) -> dict[str, Any]:
    """The field `receipt` of a response, `receipts` of several answers, or why there is none.

    `answers`: the tokens by prompt and choice.
    """

    def make() -> list[dict[str, Any]]:
        made = [
            Receipt.of(engine.llm, prepared.prompts[prompt], prepared.requests[prompt], tokens)
            for (prompt, _), tokens in sorted(answers.items())
        ]
        for receipt in made if engine.settings.receipts is not None else ():
            receipt.save(Path(engine.settings.receipts or "").expanduser() / f"{receipt.name}.json")
        return [receipt.as_json() for receipt in made]

    try:
        made = await engine.run_in_thread(make)
    except (InvalidRequest, OSError) as error:
        return {"receipt": None, "receipt_error": str(error)}
    return {"receipt": made[0]} if len(made) == 1 else {"receipts": made}
