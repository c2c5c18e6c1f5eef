"""/api/chat and /api/generate."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.engine.request import Request
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.engine_requests import choose_method
from twostroke.server.generate import generate
from twostroke.server.http.responses import json_response, leave_out, warn
from twostroke.server.ollama import translate
from twostroke.server.ollama.answers import OllamaAnswer
from twostroke.server.ollama.schemas import OllamaBody, OllamaChatBody, OllamaGenerateBody
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.prepare_chat import Conversation
from twostroke.server.openai.routes.generate import refuse

router = APIRouter(prefix="/api")


@router.post("/chat")
async def chat(body: OllamaChatBody, http: HttpRequest) -> Response:
    """Answer a conversation."""
    engine: AsyncEngine = http.app.state.engine
    warn_of_fields(http, body)
    if not body.messages:
        return _loaded(engine, body, {"message": {"role": "assistant", "content": ""}})
    return await _answer(http, body, Conversation(engine, translate.chat(body, engine.name, engine.llm.generation)))


@router.post("/generate")
async def generate_text(body: OllamaGenerateBody, http: HttpRequest) -> Response:
    """Answer a prompt."""
    engine: AsyncEngine = http.app.state.engine
    warn_of_fields(http, body)
    refuse(("suffix", bool(body.suffix)))
    if not body.prompt:
        return _loaded(engine, body, {"response": ""})
    conversation = Conversation(engine, translate.prompt(body, engine.name, engine.llm.generation))
    return await _answer(http, body, conversation)


async def _answer(http: HttpRequest, body: OllamaBody, conversation: Conversation) -> Response:
    engine: AsyncEngine = http.app.state.engine
    raw = body.prompt if isinstance(body, OllamaGenerateBody) and body.raw else None

    def prepare() -> list[Request]:
        return conversation.requests(raw)

    def answer(active_call: ActiveCall) -> Answer:
        warn(http.scope, conversation.warnings)
        leave_out(http.scope, conversation.left_out)
        chat, logprobs = isinstance(body, OllamaChatBody), body.logprobs
        return OllamaAnswer(body.model, active_call, engine.llm.tokenizer, chat=chat, logprobs=logprobs)

    return await generate(http, conversation.body.terms(), prepare, answer)


def _loaded(engine: AsyncEngine, body: OllamaBody, empty: dict[str, Any]) -> Response:
    """The answer to a client that wants the model loaded, which it is, or unloaded, which it cannot be."""
    choose_method(engine.name, translate.served_name(body.model, engine.name), None)
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json_response({"model": body.model, "created_at": now, **empty, "done": True, "done_reason": "load"})
