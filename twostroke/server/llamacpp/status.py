"""/props, /slots and /apply-template: what the server has, what it does, and a conversation's prompt as text."""

from importlib import metadata
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.engine.options import GUESSER
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.engine_requests import choose_method
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.llamacpp.schemas import DEFAULTS, ApplyTemplateBody
from twostroke.server.openai.prepare_chat import prompt_tokens, unused_variables
from twostroke.server.openai.schemas.base_model import warn_of_fields

router = APIRouter()


@router.get("/props")
async def props(engine: CurrentEngine) -> Response:
    """The model, its context, its template, and the defaults of llama.cpp's routes."""
    llm = engine.llm
    special = llm.tokenizer.special_tokens
    facts: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": llm.max_model_len, "params": {**DEFAULTS, **llm.generation}},
        "total_slots": engine.max_running,
        "model_alias": engine.name,
        "model_path": str(llm.path),
        "modalities": {"vision": False, "audio": False},
        "chat_template": llm.tokenizer.chat_template or "",
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "build_info": f"twostroke {metadata.version('twostroke')}",
    }
    return json_response(facts)


@router.get("/slots")
async def slots(engine: CurrentEngine) -> Response:
    """A slot for each choice that may run at once; there are no fixed ones, so the busy ones come first."""
    n_ctx, most = engine.llm.max_model_len, engine.max_running
    speculative, busy = not engine.llm.engine.models.keys().isdisjoint(("draft", GUESSER)), engine.in_flight
    return json_response(
        [{"id": id, "n_ctx": n_ctx, "speculative": speculative, "is_processing": id < busy} for id in range(most)]
    )


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """The text that a chat of these messages would continue."""
    warn_of_fields(http, body, *unused_variables(engine, body))
    choose_method(engine.name, body.model, None)
    made = await engine.run_in_thread(lambda: prompt_tokens(engine.llm, body))
    return json_response({"prompt": made.text} | call_log(http.scope).answer_fields)
