"""Contexts in calls: their KV is computed, or loaded from tiers, and held in the host; a call finds them by name."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from twostroke.api.llm import LLM
from twostroke.api.request_maker import NO_ANSWER
from twostroke.engine.request import Request
from twostroke.server.active_call import ActiveCall
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.contexts.context import Context
from twostroke.server.contexts.contexts import Contexts
from twostroke.server.contexts.held_kv import HeldKV, holding
from twostroke.server.contexts.schemas import TTL_S, ContextBody
from twostroke.server.engine_requests import check_length, check_size
from twostroke.server.errors import ApiError
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import all_of, cancel_on_disconnect
from twostroke.server.openai.prepare_chat import prompt_tokens
from twostroke.server.openai.schemas.chat import ChatBody, ChatMessage, ChatPrompt
from twostroke.server.openai.schemas.common import salt_bytes
from twostroke.server.tenants.tenant import current_tenant, tenant_call

P = TypeVar("P", bound=ChatPrompt)


async def find_context(http: HttpRequest, name: str) -> Context:
    """The context of this name. One of before a restart gets its KV. Raises ApiError or ClientDisconnected."""
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    engine.require_engine_process()
    context = contexts.get(name)
    if context.kv is not None:
        return context
    with engine.reserve_call(1) as active_call:
        request = await _request(http, context.body, contexts.held(context.parent))
        kv = await _compute(http, active_call, request, 0)
    contexts.put(replace(contexts.get(name), held=kv))
    return contexts.get(name)


async def hold(
    http: HttpRequest, body: ContextBody, ttl: float, parent: Context | None = None, answer: tuple[int, ...] = ()
) -> Context:
    """Compute a context and hold it for `ttl` seconds, which may be infinity. Pages of `parent` are its own too.

    Raises ApiError or ClientDisconnected.
    """
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    name = body.name or f"ctx_{secrets.token_hex(12)}"
    with engine.reserve_call(1) as active_call:
        request = await _request(http, body, parent)
        log = call_log(http.scope)
        if not log.requests:  # the tokens of an answer that is kept were taken for the answer
            tenant_call.get().reserve([request], engine.llm.max_model_len)
            log.requests = [request]
        context = contexts.known(name, body)
        if context is None or context.kv is None:
            body_bytes = len(body.model_dump_json())
            kv = await _compute(http, active_call, request, body_bytes)
            now = time.time()
            above = None if parent is None else parent.name
            owner = current_tenant().space
            made = Context(name, body, request.prompt_tokens, kv, body_bytes, now, now, above, answer, owner)
            context = contexts.known(name, body) or made  # another call may have put the same context meanwhile
            context = context if context.kv is not None else replace(context, held=kv)
    context = replace(context, expires=time.time() + ttl)
    contexts.put(context)
    return context


async def keep_answer(
    http: HttpRequest, body: ChatBody, message: dict[str, Any], ids: Sequence[int], context: Context | None
) -> dict[str, Any]:
    """Hold the conversation of `body` with its answer. Returns fields of the response: its name, or why there is none.

    The pages of the answer are found in the prefix index, so next to nothing is computed. `context` is the one that the
    body goes on from. An answer that goes on with an assistant's message is one with it.
    """
    messages, before = [one.as_text() for one in body.messages], tuple[int, ...]()
    content = message.get("content") or ""
    if body.continue_final_message:
        content = (messages.pop().content or "") + content
        before = () if context is None else context.answer
    last = ChatMessage(
        role="assistant",
        content=content,
        tool_calls=message.get("tool_calls"),
        reasoning_content=message.get("reasoning_content"),
    )
    kept = ContextBody(
        messages=[*messages, last],
        tools=body.tools,
        chat_template_kwargs=body.variables,
        cache_salt=body.cache_salt,
        name=body.keep if isinstance(body.keep, str) else None,
    )
    try:
        made = await hold(http, kept, TTL_S, context, (*before, *ids))
    except ApiError as error:
        return {"context": None, "context_error": error.message}
    return {"context": made.name}


async def with_named(http: HttpRequest, body: P) -> tuple[P, Sequence[Context]]:
    """The body with the texts of the contexts that parts of its messages name, and these contexts. Raises ApiError.

    A text is encoded by itself where it stands. So it has the tokens of the context, whose KV the technique `passages`
    finds in the prefix index and moves to its place.
    """
    names = [name for message in body.messages for name in message.contexts]
    if not names:
        return body, ()
    for field in ("passage_budget", "truncate_prompt_tokens"):
        if getattr(body, field, None) is not None:
            raise ApiError(400, f"{field} cannot be combined with parts of type context: leave it out", param=field)
    engine: AsyncEngine = http.app.state.engine
    found = {name: await find_context(http, name) for name in dict.fromkeys(names)}
    texts = {name: context.text for name, context in found.items()}
    check_length(engine.llm, sum(found[name].tokens for name in names))
    messages = [message.with_contexts(texts) for message in body.messages]
    return body.model_copy(update={"messages": messages}), list(found.values())


async def _request(http: HttpRequest, body: ContextBody, parent: Context | None) -> Request:
    engine: AsyncEngine = http.app.state.engine
    made = engine.run_in_thread(lambda: request_of(engine.llm, body, parent))
    request = await cancel_on_disconnect(http.receive, made)
    engine.require_engine_process()
    return request


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
    ids, salt = llm.encode(tokens), salt_bytes(body.cache_salt)
    program = partial(holding, llm, ids, salt)
    whole = program if parent is None else parent.with_context(llm, ids, program, salt)
    request = Request(whole, NO_ANSWER, llm.tokenizer, len(ids))
    request.cache_salt, request.prompt = salt, ids
    return request


async def _compute(http: HttpRequest, active_call: ActiveCall, request: Request, body_bytes: int) -> HeldKV:
    """The request's result. Raises ApiError or ClientDisconnected."""
    engine: AsyncEngine = http.app.state.engine
    contexts: Contexts = http.app.state.contexts
    pool = engine.llm.pool
    if engine.llm.model.index is None:
        raise ApiError(400, "this server holds no contexts: serve without --prefix-index off", code="no_contexts")

    with contexts.room(request.prompt_tokens // pool.page_size * pool.page_bytes + body_bytes):
        engine.submit(active_call, [request], None)
        await cancel_on_disconnect(http.receive, all_of(active_call.updates()))
    if request.result is None:
        raise ApiError(413, "there is no memory left for the context: delete others", code="contexts_full")
    return request.result
