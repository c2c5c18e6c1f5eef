"""/api/chat, /api/generate, and /api/embed with /api/embeddings, its older form."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from twostroke.engine.request import Request
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.engine_requests import choose_method, infill_prompt
from twostroke.server.generate import generate
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.ollama import translate
from twostroke.server.ollama.answers import OllamaAnswer, nanoseconds
from twostroke.server.ollama.schemas import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from twostroke.server.openai.prepare_chat import PreparedChat, prepare_chat, prompt_ids, unused_variables
from twostroke.server.openai.schemas.base_model import listed, warn_of_fields, whole_number
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.prefills import PrefillBody, embed

router = APIRouter(prefix="/api")


@router.post("/chat")
async def chat(body: OllamaChatBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Answer a conversation."""
    warn_of_fields(http, body)
    if not body.messages:
        return _loaded(http, engine, body)
    asked = translate.chat(body, engine.llm.generation)
    return await _answer(http, body, asked, lambda: prepare_chat(engine, asked))


@router.post("/generate")
async def generate_text(body: OllamaGenerateBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Answer a prompt."""
    warn_of_fields(http, body)
    if not body.prompt and not body.suffix:
        return _loaded(http, engine, body)
    asked = translate.prompt(body, engine.llm.generation)

    def prepare() -> PreparedChat:
        if body.suffix:
            return _prepare_infill(engine, body, asked)
        if body.raw:
            return prepare_chat(engine, asked, prompt=body.prompt)
        if not body.context:
            return prepare_chat(engine, asked)
        ids, bos = prompt_ids(engine, asked), engine.llm.tokenizer.bos_id
        return prepare_chat(engine, asked, prompt=[*body.context, *(ids[1:] if ids[:1] == [bos] else ids)])

    return await _answer(http, body, asked, prepare)


def _prepare_infill(engine: AsyncEngine, body: OllamaGenerateBody, asked: ChatBody) -> PreparedChat:
    """What stands between prompt and suffix. They go through no template, so there is no system message."""
    prompt = infill_prompt(engine.llm, body.prompt, body.suffix)
    assert engine.llm.tokenizer.infill is not None
    ends = {"stop_token_ids": sorted(engine.llm.tokenizer.infill.ends)}
    return prepare_chat(engine, asked.model_copy(update=ends), prompt=prompt)


async def _answer(
    http: HttpRequest, body: OllamaBody, asked: ChatBody, prepare: Callable[[], PreparedChat]
) -> Response:
    engine: AsyncEngine = http.app.state.engine
    call_log(http.scope).warn(unused_variables(engine, asked, dict.fromkeys(("thinking", "reasoning_effort"), "think")))

    def answer(prepared: PreparedChat, active_call: ActiveCall) -> Answer:
        continuable = isinstance(body, OllamaGenerateBody) and not body.raw and not body.suffix
        return OllamaAnswer(
            body.model,
            active_call,
            engine.llm.tokenizer,
            chat=isinstance(body, OllamaChatBody),
            logprobs=body.logprobs,
            prompt=prepared.prompts[0] if continuable else None,
        )

    return await generate(http, asked.call_options(), prepare, answer)


def _loaded(http: HttpRequest, engine: AsyncEngine, body: OllamaBody) -> Response:
    choose_method(engine.name, body.model, None)
    return nothing_asked(http.url.path, body.model, "unload" if http.scope.get("keep_s") == 0 else "load")


def nothing_asked(path: str, model: str, reason: str) -> Response:
    """The answer to a client that wants a model loaded, which it is, or unloaded, which one of several can be."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    empty = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
    return json_response({"model": model, "created_at": now, **empty, "done": True, "done_reason": reason})


class OllamaPrefillBody(PrefillBody):
    """The fields of both forms. A model stays loaded, whatever `keep_alive` says."""

    HARMLESS = frozenset({"keep_alive"})
    model: Annotated[str, Field(min_length=1)]  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
    options: OllamaOptions = OllamaOptions()


class OllamaEmbedBody(OllamaPrefillBody):
    """One text or several. With `truncate`, which is Ollama's default, a text is cut where it has no room."""

    input: Annotated[list[str], BeforeValidator(listed)] = Field(default_factory=list)
    truncate: bool = True
    dimensions: Annotated[int | None, Field(ge=1), BeforeValidator(whole_number)] = None


class OllamaEmbeddingsBody(OllamaPrefillBody):
    """One text."""

    prompt: str = ""


@router.post("/embed")
async def embed_texts(body: OllamaEmbedBody, http: HttpRequest) -> Response:
    """Embeddings of length 1."""

    def write(made: list[np.ndarray], request: Request) -> dict[str, Any]:
        times = request.timings
        return {
            "model": body.model,
            "embeddings": [one.tolist() for one in made],
            "total_duration": nanoseconds((times.finished or times.arrival) - times.arrival),
            "load_duration": 0,
            "prompt_eval_count": request.prompt_tokens,
        }

    return await embed(
        http, body, body.input, write, dimensions=body.dimensions, normalized=True, truncate=body.truncate
    )


@router.post("/embeddings")
async def embed_text(body: OllamaEmbeddingsBody, http: HttpRequest) -> Response:
    """The embedding of one text, as the model computes it."""

    def write(made: list[np.ndarray], _: Request) -> dict[str, Any]:
        return {"embedding": made[0].tolist()}

    return await embed(http, body, [body.prompt], write, truncate=True)
