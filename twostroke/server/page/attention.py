"""/attention: what a token of a conversation attended to."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from twostroke.api.llm import LLM
from twostroke.engine.strokes import Prefilled
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.server.active_call import CallOptions
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.engine_requests import Prepared, check_length, choose_method
from twostroke.server.generate import run_request
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.schemas.base_model import LenientModel, TokenId, whole_number
from twostroke.study.explain.attention import TokenAttention, attention_request, check_index, chosen_layer

router = APIRouter()
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
