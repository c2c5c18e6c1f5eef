"""/v1/messages and /v1/messages/count_tokens."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.anthropic.answer import MessageAnswer
from twostroke.server.anthropic.schemas import MessagesBody, PromptBody
from twostroke.server.anthropic.translate import chat_from_anthropic
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.contexts.hold import with_named
from twostroke.server.generate import generate
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.openai.prepare_chat import PreparedChat, prepare_chat, prompt_ids, unused_variables
from twostroke.server.openai.schemas.base_model import warn_of_fields

router = APIRouter(prefix="/v1/messages")


@router.post("")
async def messages(body: MessagesBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Answer a conversation."""
    chat, warnings = chat_from_anthropic(body, engine.name)
    warn_of_fields(http, body)
    unused = unused_variables(engine, chat, {"reasoning_effort": "output_config.effort"})
    call_log(http.scope).warn([*warnings, *unused])

    chat, named = await with_named(http, chat)

    def prepare() -> PreparedChat:
        return prepare_chat(engine, chat, named=named)

    def answer(_: PreparedChat, active_call: ActiveCall) -> Answer:
        return MessageAnswer(body.model, active_call)

    return await generate(http, chat.call_options(), prepare, answer)


@router.post("/count_tokens")
async def count_tokens(body: PromptBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """How many tokens the same body has as a prompt."""
    chat, _ = chat_from_anthropic(body, engine.name)
    warn_of_fields(http, body)
    chat, _ = await with_named(http, chat)
    tokens = await engine.run_in_thread(lambda: prompt_ids(engine, chat))
    return json_response({"input_tokens": len(tokens)})
