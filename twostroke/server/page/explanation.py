"""/explain: the walk through one answer that was just made, as a file that opens offline (`study/explain`)."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from twostroke.api.llm import LLM
from twostroke.engine.calibration import calibrate
from twostroke.engine.engine import Engine
from twostroke.models.step_predictor import StepPredictor
from twostroke.sampling.params import SamplingParams
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.engine_requests import check_length, choose_method
from twostroke.server.http.responses import cancel_on_disconnect
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.schemas.base_model import LenientModel, TokenId
from twostroke.server.tenants.tenant import tenant_call
from twostroke.study.explain.explanation import ExplainOptions, explain
from twostroke.study.explain.html_page import page

router = APIRouter()
MAX_PROMPT = 1024  # tokens: what is observed of each is in the file
MAX_ANSWER = 64  # tokens of the answer that are explained: the first ones


class ExplainBody(LenientModel):
    """A prompt's tokens, those of its answer, and a title."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT)]
    answer: Annotated[list[TokenId], Field(min_length=1)]
    title: Annotated[str, Field(max_length=10_000)] = ""


@router.post("/explain")
async def explain_answer(body: ExplainBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """The page of an answer: a plain pass over the same tokens, with everything observed.

    It takes some seconds, in which other requests go on; the first call also times the model, which takes one in
    which they wait.
    """
    warn_of_fields(http, body)
    choose_method(engine.name, None, None)
    llm, answer = engine.llm, body.answer[:MAX_ANSWER]
    check_length(llm, len(body.tokens) + len(answer) - 1)
    llm.encode([*body.tokens, *answer])  # ids outside of the vocabulary
    with engine.reserve_call(1):
        call = tenant_call.get()
        call.spend(2 * (len(body.tokens) + len(answer)))  # they are computed twice
        predictor: StepPredictor | None = getattr(http.app.state, "predictor", None)
        if predictor is None:
            predictor = await engine.between_steps(_calibrated)
            http.app.state.predictor = predictor
        options = ExplainOptions(naive=0, predictor=predictor, cache_salt=call.tenant.salt(None))
        work = partial(_page, title=body.title, tokens=body.tokens, options=options, answer=answer)
        text: bytes = await cancel_on_disconnect(http.receive, engine.beside_steps(work))
    headers = {"content-disposition": 'attachment; filename="explanation.html"', "x-content-type-options": "nosniff"}
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


def _calibrated(engine: Engine) -> StepPredictor:
    return calibrate(engine.models[engine.default])


def _page(llm: LLM, title: str, tokens: list[int], options: ExplainOptions, answer: list[int]) -> bytes:
    made = explain(llm, title, tokens, SamplingParams(), options, answer)
    return page(made).encode("utf-8", "backslashreplace")
