"""/infill: what stands between two texts, with other files of the repository before them."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.engine_requests import Prepared, choose_method, engine_requests
from twostroke.server.generate import generate
from twostroke.server.infill import infill_ends, infill_prompt
from twostroke.server.llamacpp.answers import LlamaCppAnswer
from twostroke.server.llamacpp.schemas import DEFAULTS, InfillBody
from twostroke.server.openai.constraints import constraint
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.routes.generate import refuse
from twostroke.server.openai.schemas.common import salt_bytes
from twostroke.server.receipts import with_receipt

router = APIRouter()


@router.post("/infill")
async def infill(body: InfillBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Fill in. Of the other files, the first are left out where there is no room for all."""
    warn_of_fields(http, body)
    body = body.with_defaults({**DEFAULTS, **engine.llm.generation})
    technique = choose_method(engine.name, body.model, body.method)
    refuse(
        ("n", body.n != 1),
        ("context", body.context is not None),
        ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None),
        ("a receipt without an answer", body.receipt and body.max_tokens == 0),
    )
    llm = engine.llm

    def prepare() -> Prepared:
        warnings: list[str] = []
        params = infill_ends(llm, body.sampling(body.max_tokens, None, constraint(engine.grammars, body, warnings)))
        if body.receipt:
            params = with_receipt(params, technique)
        files = [(file.filename, file.text) for file in body.input_extra]
        most = llm.max_model_len - min(body.max_tokens or 1, llm.max_model_len // 4)
        tokens = infill_prompt(llm, body.input_prefix + body.prompt, body.input_suffix, files, most)
        requests = engine_requests(llm, [tokens], params, technique, salt=salt_bytes(body.cache_salt))
        return Prepared(requests, [tokens], warnings, receipt=body.receipt)

    def answer(_: Prepared, active_call: ActiveCall) -> Answer:
        return LlamaCppAnswer(body.model or engine.name, active_call)

    return await generate(http, body.call_options(), prepare, answer)
