"""/v1/responses: answer an input, go on from an earlier answer, and read or delete those that are stored."""

import secrets
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi import Request as HttpRequest

from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.contexts.hold import find_context, with_named
from twostroke.server.errors import ApiError
from twostroke.server.generate import generate
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.openai.answers.responses import ResponsesAnswer
from twostroke.server.openai.prepare_chat import PreparedChat, prepare_chat, prompt_ids, unused_variables
from twostroke.server.openai.response_items import chat_from_items, offered_tools
from twostroke.server.openai.routes.generate import refuse
from twostroke.server.openai.schemas.base_model import warn_of_fields
from twostroke.server.openai.schemas.responses import ResponsesBody
from twostroke.server.openai.stored_responses import StoredResponse, StoredResponses

router = APIRouter(prefix="/v1/responses")


@router.post("")
async def responses(body: ResponsesBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Answer an input with text or calls of tools."""
    stored: StoredResponses = http.app.state.stored_responses
    body = body.with_defaults(engine.llm.generation)
    body = body.model_copy(update={"truncation": body.truncation or engine.settings.truncation})
    before, items = _taken_up(engine, body, stored)
    warnings: list[str] = []
    offers = offered_tools(body.tools, warnings)
    chat = chat_from_items(body, items, [] if before is None else before.history, offers, warnings)
    warn_of_fields(http, body)
    call_log(http.scope).warn([*warnings, *unused_variables(engine, chat)])
    context = None if body.context is None else await find_context(http, body.context)
    chat, named = await with_named(http, chat)

    def prepare() -> PreparedChat:
        return prepare_chat(engine, chat, context, named=named)

    def keep(response: dict[str, Any]) -> None:
        if body.store:
            stored.put(response, before, items)

    def answer(_: PreparedChat, active_call: ActiveCall) -> Answer:
        return ResponsesAnswer(
            body.model or engine.name, active_call, body, engine.llm.tokenizer, offers=offers, keep=keep
        )

    return await generate(http, chat.call_options(), prepare, answer)


@router.post("/input_tokens")
async def input_tokens(body: ResponsesBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """How many tokens the same body has as a prompt."""
    before, items = _taken_up(engine, body, http.app.state.stored_responses)
    history = [] if before is None else before.history
    chat = chat_from_items(body, items, history, offered_tools(body.tools, []), [])
    context = None if body.context is None else await find_context(http, body.context)
    chat, _ = await with_named(http, chat)
    tokens = await engine.run_in_thread(lambda: prompt_ids(engine, chat, context))
    return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})


@router.get("/{id}")
async def retrieve(id: str, http: HttpRequest) -> Response:
    """A response that is stored."""
    stored: StoredResponses = http.app.state.stored_responses
    return json_response(stored.get(id).response)


@router.delete("/{id}")
async def delete(id: str, http: HttpRequest) -> Response:
    """Forget a response. Those that went on from it are kept."""
    stored: StoredResponses = http.app.state.stored_responses
    stored.delete(id)
    return json_response({"id": id, "object": "response", "deleted": True})


@router.get("/{id}/input_items")
async def input_items(
    id: str,
    http: HttpRequest,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items that led to a response, those of earlier responses included, in pages."""
    stored: StoredResponses = http.app.state.stored_responses
    items = list(stored.get(id).items)
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(404, f"there is no item {after!r:.80} in the input of this response", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": page, "has_more": len(items) > limit, **ends})


def _taken_up(
    engine: AsyncEngine, body: ResponsesBody, stored: StoredResponses
) -> tuple[StoredResponse | None, list[dict[str, Any]]]:
    """The response that a body goes on from, and the body's own items, each with an id."""
    refuse(("n", body.n != 1), ("prompt_logprobs", body.prompt_logprobs is not None))
    if body.previous_response_id is not None or any(item["type"] == "item_reference" for item in body.input):
        engine.require_engine_process()
    before = None if body.previous_response_id is None else stored.previous(body.previous_response_id)
    return before, [_identified(item, stored) for item in body.input]


def _identified(item: dict[str, Any], stored: StoredResponses) -> dict[str, Any]:
    if item["type"] == "item_reference":
        return stored.item(str(item.get("id")))
    return item if isinstance(item.get("id"), str) else {**item, "id": f"item_{secrets.token_hex(12)}"}
