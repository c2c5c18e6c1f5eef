"""/attention and /explain: what a token attended to, and the walk through an answer that was just made.

The walk is a file that opens offline (`study/explain`).
"""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from twostroke.api.llm import LLM
from twostroke.engine.calibration import calibrate
from twostroke.engine.engine import Engine
from twostroke.engine.strokes import Prefilled
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.models.step_predictor import StepPredictor
from twostroke.sampling.params import SamplingParams
from twostroke.server.active_call import CallOptions
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.engine_requests import Prepared, check_length, choose_method
from twostroke.server.generate import run_request
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import cancel_on_disconnect, json_response
from twostroke.server.openai.schemas.base_model import LenientModel, TokenId, warn_of_fields, whole_number
from twostroke.server.tenants.tenant import tenant_call
from twostroke.study.explain.attention import TokenAttention, attention_request, check_index, chosen_layer
from twostroke.study.explain.explanation import ExplainOptions, explain
from twostroke.study.explain.html_page import page

router = APIRouter()
MAX_PROMPT = 1024  # tokens of what is explained: what is observed of each is in the file
MAX_ANSWER = 64  # tokens of the answer that are explained: the first ones
Index = Annotated[int, Field(ge=0), BeforeValidator(whole_number)]


class AttentionBody(LenientModel):
    """The tokens of a conversation so far, and one of them by its index, the last where none is named.

    The weights are means over all layers and heads where none is named. A token was chosen by the row of the token
    before it, so what the model looked at when it wrote token i is asked for with i - 1.
    """

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1)]
    position: Index | None = None
    layer: Index | None = None
    head: Index | None = None


@router.post("/attention")
async def attention(body: AttentionBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """The attention weights of one token's query, which the engine computes in a step of its own."""
    warn_of_fields(http, body)
    choose_method(engine.name, body.model, None)
    config = engine.llm.config
    chosen_layer(config, body.layer)
    if body.head is not None:
        check_index("head", body.head, config.num_heads)
    check_length(engine.llm, len(body.tokens) - 1 if body.position is None else body.position)

    def prepare() -> Prepared:
        return Prepared([attention_request(engine.llm, body.tokens, body.position)], [body.tokens])

    with engine.reserve_call(1) as active_call:
        request = await run_request(http, active_call, CallOptions(1), prepare)
        made: Prefilled = request.result
        found: TokenAttention = await engine.beside_steps(partial(_attention_of, kv=made.kv, queries=made.queries))
    tokenizer = engine.llm.tokenizer
    facts = {
        "tokens": found.tokens,
        "texts": [tokenizer.token_text(id) for id in found.tokens],
        "positions": found.positions,
        "weights": [round(float(weight), 6) for weight in found.mean(body.layer, body.head)],
        "num_layers": config.num_layers,
        "layers": found.layers,
        "num_heads": config.num_heads,
    }
    return json_response(facts | call_log(http.scope).answer_fields)


def _attention_of(_: LLM, kv: KVCache, queries: Queries) -> TokenAttention:
    return TokenAttention.of(kv, queries)


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
