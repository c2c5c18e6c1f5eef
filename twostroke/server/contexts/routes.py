"""/v1/contexts: put the beginning of prompts under a name, fork it, look at it, list all, and delete it."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.kv.pages import DISK
from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.contexts.context import Context
from twostroke.server.contexts.contexts import Contexts
from twostroke.server.contexts.held_kv import tiers_of
from twostroke.server.contexts.hold import find_context, hold
from twostroke.server.contexts.schemas import ContextBody, ForkBody, LifeBody
from twostroke.server.engine_requests import choose_method
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.openai.prepare_chat import unused_variables
from twostroke.server.openai.schemas.base_model import warn_of_fields

router = APIRouter(prefix="/v1/contexts")


@router.post("")
async def make(body: ContextBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Compute a context and hold it. The same content under the same name again only lives longer."""
    warn_of_fields(http, body, *(unused_variables(engine, body) if body.messages else ()))
    choose_method(engine.name, body.model, None)
    return await _answer(http, body, body.seconds)


@router.post("/{name}/fork")
async def fork(name: str, body: ForkBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """A context that is another one's up to a token of the answer at its end; the pages before are the same."""
    warn_of_fields(http, body)
    parent = await find_context(http, name)
    forked, answer = parent.fork(engine.llm.tokenizer, body.at, body.text)
    return await _answer(http, forked.model_copy(update={"name": body.name}), body.seconds, parent, answer)


@router.patch("/{name}")
async def set_life(name: str, body: LifeBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Let a context live for another time from now on, or until it is deleted."""
    contexts: Contexts = http.app.state.contexts
    warn_of_fields(http, body)
    engine.require_engine_process()
    context = replace(contexts.get(name), expires=time.time() + body.seconds)
    contexts.put(context)
    return json_response((await descriptions(http, [context]))[0])


async def _answer(
    http: HttpRequest, body: ContextBody, ttl: float, parent: Context | None = None, answer: tuple[int, ...] = ()
) -> Response:
    context = await hold(http, body, ttl, parent, answer)
    return json_response((await descriptions(http, [context]))[0] | call_log(http.scope).answer_fields)


@router.get("")
async def list_all(http: HttpRequest) -> Response:
    """All contexts, in the order in which they were made. `parent` and `children` make trees of them."""
    contexts: Contexts = http.app.state.contexts
    return json_response({"object": "list", "data": await descriptions(http, contexts.all)})


@router.get("/{name}")
async def look_at(name: str, http: HttpRequest) -> Response:
    """One context."""
    contexts: Contexts = http.app.state.contexts
    return json_response((await descriptions(http, [contexts.get(name)]))[0])


@router.delete("/{name}")
async def delete(name: str, http: HttpRequest) -> Response:
    """Forget a context. Requests that have begun with it go on."""
    contexts: Contexts = http.app.state.contexts
    contexts.delete(name)
    return json_response({"object": "context", "name": name, "deleted": True})


async def descriptions(http: HttpRequest, those: Sequence[Context]) -> list[dict[str, Any]]:
    """Contexts as the API shows them."""
    engine: AsyncEngine = http.app.state.engine
    held = [None if context.kv is None else context.kv.kv for context in those]
    found: list[list[str | None]] = [[None] * len(held)]
    if any(one is not None for one in held):
        found += await engine.everywhere(partial(tiers_of, kvs=held))  # each replica knows its own
    tiers = [next((tier for tier in of_one if tier is not None), DISK) for of_one in zip(*found, strict=True)]
    return [_description(http, context, tier) for context, tier in zip(those, tiers, strict=True)]


def _description(http: HttpRequest, context: Context, tier: str) -> dict[str, Any]:
    """A context; one whose KV is not held comes from the disk, if anything of it is kept."""
    contexts: Contexts = http.app.state.contexts
    engine: AsyncEngine = http.app.state.engine
    return {
        "object": "context",
        "name": context.name,
        "model": engine.name,
        "tokens": context.tokens,
        "bytes": context.size,
        "tier": tier,
        "created_at": int(context.created),
        "expires_at": None if context.expires == math.inf else int(context.expires),
        "parent": context.parent,
        "children": [other.name for other in contexts.all if other.parent == context.name],
        "answer_tokens": len(context.answer),
    }
