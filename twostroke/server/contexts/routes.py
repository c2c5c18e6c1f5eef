"""/v1/contexts: put the beginning of prompts under a name, look at it, list all, and delete it."""

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
from twostroke.server.contexts.schemas import ContextBody
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
from twostroke.server.openai.prepare_chat import prompt_tokens
from twostroke.server.openai.schemas.common import salt_bytes

router = APIRouter(prefix="/v1/contexts")


@router.post("")
async def make(body: ContextBody, http: HttpRequest) -> Response:
    """Compute a context and hold it. The same content under the same name again only lives longer."""
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    template = engine.llm.tokenizer.template_for(bool(body.callable_functions))
    warn_of_fields(http, body, *(body.unused(template) if body.messages else ()))
    choose_method(engine.name, body.model, None)
    name = body.name or f"ctx_{secrets.token_hex(12)}"
    active_call = engine.reserve_call(1)
    try:
        request = await cancel_on_disconnect(http.receive, engine.run_in_thread(lambda: request_of(engine.llm, body)))
        call_log(http.scope).requests = [request]
        engine.require_engine_process()
        context = contexts.known(name, body)
        if context is None:
            size = size_of(engine.llm, body, request.prompt_tokens)
            with contexts.room(size):
                kv = await compute_kv(http, engine, active_call, request)
            now = time.time()  # another call may have put the same context meanwhile
            context = contexts.known(name, body) or Context(name, body, request.prompt_tokens, kv, size, now, now)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        active_call.close()
    context = replace(context, expires=time.time() + body.ttl)
    contexts.put(context)
    return json_response(description(engine, context) | call_log(http.scope).answer_fields)


@router.get("")
async def list_all(http: HttpRequest) -> Response:
    """All contexts, in the order in which they were made."""
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    return json_response({"object": "list", "data": [description(engine, context) for context in contexts.all]})


@router.get("/{name}")
async def look_at(name: str, http: HttpRequest) -> Response:
    """One context."""
    contexts: Contexts = http.app.state.contexts
    return json_response(description(http.app.state.engine, contexts.get(name)))


@router.delete("/{name}")
async def delete(name: str, http: HttpRequest) -> Response:
    """Forget a context. Requests that have begun with it go on."""
    contexts: Contexts = http.app.state.contexts
    contexts.delete(name)
    return json_response({"object": "context", "name": name, "deleted": True})


def description(engine: AsyncEngine, context: Context) -> dict[str, Any]:
    """A context as the API shows it."""
    return {
        "object": "context",
        "name": context.name,
        "model": engine.name,
        "tokens": context.tokens,
        "bytes": context.size,
        "tier": context.tier,
        "created_at": int(context.created),
        "expires_at": int(context.expires),
    }


def request_of(llm: LLM, body: ContextBody) -> Request:
    """The request whose result is a context's whole pages in the host, or None if they have no room there.

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

    request = Request(program, SamplingParams(), llm.tokenizer, len(ids))
    request.cache_salt = salt_bytes(body.cache_salt)
    return request


def size_of(llm: LLM, body: ContextBody, tokens: int) -> int:
    """Bytes that a context takes: its whole pages, and the body, whose messages are needed again."""
    return tokens // llm.pool.page_size * llm.pool.page_bytes + len(body.model_dump_json())


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
