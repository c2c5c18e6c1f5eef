"""/v1/contexts: put the beginning of prompts under a name, fork it, look at it, list all, and delete it."""

import math
import secrets
import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import HOST
from twostroke.sampling.params import SamplingParams
from twostroke.server.active_call import ActiveCall
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.contexts.context import Context
from twostroke.server.contexts.contexts import Contexts
from twostroke.server.contexts.schemas import ContextBody, ForkBody, LifeBody
from twostroke.server.engine_requests import check_length, check_size, choose_method
from twostroke.server.errors import ApiError
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import (
    CLIENT_CLOSED_REQUEST,
    ClientDisconnected,
    cancel_on_disconnect,
    json_response,
)
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.prepare_chat import prompt_tokens, unused_variables
from twostroke.server.openai.schemas.common import salt_bytes

router = APIRouter(prefix="/v1/contexts")


@router.post("")
async def make(body: ContextBody, http: HttpRequest) -> Response:
    """Compute a context and hold it. The same content under the same name again only lives longer."""
    engine: AsyncEngine = http.app.state.engine
    warn_of_fields(http, body, *(unused_variables(engine, body) if body.messages else ()))
    choose_method(engine.name, body.model, None)
    return await _answer(http, body, body.seconds)


@router.post("/{name}/fork")
async def fork(name: str, body: ForkBody, http: HttpRequest) -> Response:
    """A context that is another one's up to a token of the answer at its end; the pages before are the same."""
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    warn_of_fields(http, body)
    engine.require_engine_process()
    parent = contexts.get(name)
    forked, answer = parent.fork(engine.llm.tokenizer, body.at, body.text)
    return await _answer(http, forked.model_copy(update={"name": body.name}), body.seconds, parent, answer)


@router.patch("/{name}")
async def set_life(name: str, body: LifeBody, http: HttpRequest) -> Response:
    """Let a context live for another time from now on, or until it is deleted."""
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    warn_of_fields(http, body)
    engine.require_engine_process()
    context = replace(contexts.get(name), expires=time.time() + body.seconds)
    contexts.put(context)
    return json_response(description(http, context))


async def _answer(
    http: HttpRequest, body: ContextBody, ttl: float, parent: Context | None = None, answer: tuple[int, ...] = ()
) -> Response:
    try:
        context = await hold(http, body, ttl, parent, answer)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return json_response(description(http, context) | call_log(http.scope).answer_fields)


@router.get("")
async def list_all(http: HttpRequest) -> Response:
    """All contexts, in the order in which they were made. `parent` and `children` make trees of them."""
    contexts: Contexts = http.app.state.contexts
    return json_response({"object": "list", "data": [description(http, context) for context in contexts.all]})


@router.get("/{name}")
async def look_at(name: str, http: HttpRequest) -> Response:
    """One context."""
    contexts: Contexts = http.app.state.contexts
    return json_response(description(http, contexts.get(name)))


@router.delete("/{name}")
async def delete(name: str, http: HttpRequest) -> Response:
    """Forget a context. Requests that have begun with it go on."""
    contexts: Contexts = http.app.state.contexts
    contexts.delete(name)
    return json_response({"object": "context", "name": name, "deleted": True})


def description(http: HttpRequest, context: Context) -> dict[str, Any]:
    """A context as the API shows it."""
    contexts: Contexts = http.app.state.contexts
    engine: AsyncEngine = http.app.state.engine
    return {
        "object": "context",
        "name": context.name,
        "model": engine.name,
        "tokens": context.tokens,
        "bytes": context.size,
        "tier": context.tier,
        "created_at": int(context.created),
        "expires_at": None if context.expires == math.inf else int(context.expires),
        "parent": context.parent,
        "children": [other.name for other in contexts.all if other.parent == context.name],
        "answer_tokens": len(context.answer),
    }


async def hold(
    http: HttpRequest,
    body: ContextBody,
    ttl: float,
    parent: Context | None = None,
    answer: tuple[int, ...] = (),
) -> Context:
    """Compute a context and hold it for `ttl` seconds, which may be infinity. Pages of `parent` are its own too.

    Raises ApiError or ClientDisconnected.
    """
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    name = body.name or f"ctx_{secrets.token_hex(12)}"
    active_call = engine.reserve_call(1)
    try:
        request = await cancel_on_disconnect(
            http.receive, engine.run_in_thread(lambda: request_of(engine.llm, body, parent))
        )
        log = call_log(http.scope)
        log.requests = log.requests or [request]
        engine.require_engine_process()
        context = contexts.known(name, body)
        if context is None:
            pages, body_bytes = request.prompt_tokens // engine.llm.pool.page_size, len(body.model_dump_json())
            with contexts.room(pages * engine.llm.pool.page_bytes + body_bytes):
                kv = await compute_kv(http, engine, active_call, request)
            now = time.time()  # another call may have put the same context meanwhile
            above = None if parent is None else parent.name
            made = Context(name, body, request.prompt_tokens, kv, body_bytes, now, now, above, answer)
            context = contexts.known(name, body) or made
    finally:
        active_call.close()
    context = replace(context, expires=time.time() + ttl)
    contexts.put(context)
    return context


def request_of(llm: LLM, body: ContextBody, parent: Context | None = None) -> Request:
    """The request whose result is a context's whole pages in the host, or None if they have no room there.

    What it has in common with `parent` is not computed again.

    Takes long: call it off the event loop. Raises ApiError or InvalidRequest.
    """
    if body.messages:
        tokens = prompt_tokens(llm, body)
    elif isinstance(body.prompt, str):
        check_size(llm, body.prompt)
        tokens = llm.tokenizer.encode(body.prompt)
    else:
        tokens = body.prompt
    if not tokens:
        raise ApiError(400, "prompt: it is empty: give at least one token", param="prompt")
    check_length(llm, len(tokens))
    ids, size = llm.encode(tokens), llm.pool.page_size

    def program() -> Program:
        kv = yield Prefill(ids, logits="none")
        try:  # here, since no other thread may hold pages of the pool that a running request needs
            return kv[: len(kv) // size * size].to(HOST)
        except OutOfPages:
            return None

    salt, index = salt_bytes(body.cache_salt), llm.model.index
    whole = program if parent is None or index is None else parent.with_context(index, ids, program, salt)
    request = Request(whole, SamplingParams(), llm.tokenizer, len(ids))
    request.cache_salt = salt
    return request


async def compute_kv(http: HttpRequest, engine: AsyncEngine, active_call: ActiveCall, request: Request) -> KVCache:
    """The request's result. Raises ApiError or ClientGone."""
    if engine.llm.model.index is None:
        raise ApiError(400, "this server holds no contexts: serve without --prefix-index off", code="no_contexts")

    async def finish() -> None:
        async for _ in active_call.updates():
            pass

    engine.submit(active_call, [request], None)
    await cancel_on_disconnect(http.receive, finish())
    if request.result is None:
        raise ApiError(413, "there is no memory left for the context: delete others", code="contexts_full")
    return request.result
