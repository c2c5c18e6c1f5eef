"""/infill, /completion, /embedding, /props, /slots and /apply-template."""

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator

from twostroke.engine.options import GUESSER
from twostroke.engine.request import Request
from twostroke.sampling.params import SamplingParams
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.engine_requests import (
    Prepared,
    check_size,
    choose_method,
    engine_requests,
    infill_ends,
    infill_prompt,
    with_receipt,
)
from twostroke.server.generate import generate
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.llamacpp.answers import LlamaCppAnswer
from twostroke.server.llamacpp.schemas import (
    DEFAULTS,
    ApplyTemplateBody,
    InfillBody,
    LlamaCppBody,
    LlamaCppCompletionBody,
)
from twostroke.server.openai.constraints import constraint
from twostroke.server.openai.prepare_chat import prompt_tokens, unused_variables
from twostroke.server.openai.routes.generate import refuse
from twostroke.server.openai.schemas.base_model import warn_of_fields, whole_number
from twostroke.server.openai.schemas.common import salt_bytes
from twostroke.server.openai.schemas.completions import prompts
from twostroke.server.prefills import PrefillBody, embed

router = APIRouter()


@router.post("/infill")
async def infill(body: InfillBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Fill in. Of the other files, the first are left out where there is no room for all."""
    llm = engine.llm

    def prompt() -> list[int]:
        files = [(file.filename, file.text) for file in body.input_extra]
        most = llm.max_model_len - min(body.max_tokens or 1, llm.max_model_len // 4)
        return infill_prompt(llm, body.input_prefix + body.prompt, body.input_suffix, files, most)

    return await _complete(http, body, prompt, lambda params: infill_ends(llm, params))


@router.post("/completion")
async def completion(body: LlamaCppCompletionBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Continue a text."""
    llm, (asked,) = engine.llm, body.prompt

    def prompt() -> list[int]:
        if isinstance(asked, str):
            check_size(llm, asked)
        return llm.encode(asked)

    return await _complete(http, body, prompt, lambda params: params)


async def _complete(
    http: HttpRequest,
    body: LlamaCppBody,
    prompt: Callable[[], list[int]],
    ending: Callable[[SamplingParams], SamplingParams],
) -> Response:
    """Answer a prompt; both functions run off the event loop. `ending` adds what ends an answer."""
    engine: AsyncEngine = http.app.state.engine
    warn_of_fields(http, body)
    body = body.with_defaults({**DEFAULTS, **engine.llm.generation})
    technique = choose_method(engine.name, body.model, body.method)
    refuse(
        ("n", body.n != 1),
        ("context", body.context is not None),
        ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None),
        ("a receipt without an answer", body.receipt and body.max_tokens == 0),
    )

    def prepare() -> Prepared:
        warnings: list[str] = []
        params = ending(body.sampling(body.max_tokens, None, constraint(engine.grammars, body, warnings)))
        if body.receipt:
            params = with_receipt(params, technique)
        tokens = prompt()
        requests = engine_requests(engine.llm, [tokens], params, technique, salt=salt_bytes(body.cache_salt))
        return Prepared(requests, [tokens], warnings, receipt=body.receipt)

    def answer(_: Prepared, active_call: ActiveCall) -> Answer:
        return LlamaCppAnswer(body.model or engine.name, active_call)

    return await generate(http, body.call_options(), prepare, answer)


class LlamaCppEmbeddingBody(PrefillBody):
    """Texts or token ids. `embd_normalize` is 2 for length 1, or -1 for what the model computes."""

    ALIASES: ClassVar[Mapping[str, str]] = {"input": "content"}
    content: Annotated[Any, BeforeValidator(prompts)]
    embd_normalize: Annotated[Literal[-1, 2], BeforeValidator(whole_number)] = 2


@router.post("/embedding")
@router.post("/embeddings")
async def embedding(body: LlamaCppEmbeddingBody, http: HttpRequest) -> Response:
    """A list of embeddings; each is in a list of its own, since other poolings give several."""

    def write(made: list[np.ndarray], _: Request) -> list[dict[str, Any]]:
        return [{"index": index, "embedding": [one.tolist()]} for index, one in enumerate(made)]

    return await embed(http, body, body.content, write, normalized=body.embd_normalize == 2)


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
