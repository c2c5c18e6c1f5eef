"""/infill, what stands between two texts with other files of the repository before them, and /completion."""

from collections.abc import Callable

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

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
from twostroke.server.llamacpp.answers import LlamaCppAnswer
from twostroke.server.llamacpp.schemas import DEFAULTS, InfillBody, LlamaCppBody, LlamaCppCompletionBody
from twostroke.server.openai.constraints import constraint
from twostroke.server.openai.routes.generate import refuse
from twostroke.server.openai.schemas.base_model import warn_of_fields
from twostroke.server.openai.schemas.common import salt_bytes

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
