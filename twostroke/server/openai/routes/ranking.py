"""/v1/rerank and /v1/score: how well documents answer a query. In the forms of Jina, Cohere and vLLM."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from twostroke.api.reranking import broadcast
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.server.embeddings import PrefillAnswer, check_sizes, prefilled, prefilling_engine
from twostroke.server.errors import ApiError, invalid
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.routes.embeddings import PrefillBody
from twostroke.server.openai.schemas.base_model import Neutral, listed, whole_number
from twostroke.server.openai.schemas.completions import MAX_PROMPTS

router = APIRouter()


def _documents(value: Any) -> Any:
    """Texts, or objects with a text."""
    if not isinstance(value, list):
        return value
    return [one.get("text") if isinstance(one, dict) else one for one in value]  # pyright: ignore


Texts = Annotated[list[str], BeforeValidator(listed), Field(min_length=1, max_length=MAX_PROMPTS)]


class RankingBody(PrefillBody):
    """What both bodies have. `instruction` tells the model what a good document is."""

    UNSUPPORTED: ClassVar[Neutral] = {"truncate_prompt_tokens": (), "max_tokens_per_doc": ()}
    instruction: str | None = None


class RerankBody(RankingBody):
    """A query, and documents to be put in the order of how well they answer it."""

    ALIASES: ClassVar[Mapping[str, str]] = {"texts": "documents"}
    query: str
    documents: Annotated[Texts, BeforeValidator(_documents)]
    top_n: Annotated[int | None, Field(ge=1), BeforeValidator(whole_number)] = None
    return_documents: bool = True


class ScoreBody(RankingBody):
    """Pairs of texts: each of `text_1` with the same of `text_2`, or one with all."""

    ALIASES: ClassVar[Mapping[str, str]] = {"queries": "text_1", "documents": "text_2"}
    text_1: Texts
    text_2: Texts


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(body: RerankBody, http: HttpRequest) -> Response:
    """The documents, the best one first."""

    def write(scores: Sequence[float], answer: PrefillAnswer) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
            for index in order
        ]
        return {"id": f"rerank-{secrets.token_hex(16)}", "object": "list", "results": results, **_end(answer)}

    return await _rank(http, body, lambda: [(body.query, text) for text in body.documents], write)


@router.post("/v1/score")
@router.post("/score")
async def score(body: ScoreBody, http: HttpRequest) -> Response:
    """A number from 0 to 1 for each pair."""

    def write(scores: Sequence[float], answer: PrefillAnswer) -> dict[str, Any]:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
        return {**head, "data": data, **_end(answer)}

    return await _rank(http, body, lambda: broadcast(body.text_1, body.text_2), write)


async def _rank(
    http: HttpRequest,
    body: RankingBody,
    pairs_of: Callable[[], list[tuple[str, str]]],
    write: Callable[[Sequence[float], PrefillAnswer], Any],
) -> Response:
    warn_of_fields(http, body)
    engine = prefilling_engine(http, body, "documents are ranked")
    llm, reranker = engine.llm, engine.llm.reranker
    if reranker is None:
        message = f"{engine.name} ranks no documents: serve a reranker, such as Qwen3-Reranker"
        raise ApiError(400, message, code="no_reranker")
    try:
        pairs = pairs_of()
    except InvalidRequest as error:
        raise invalid(error) from None

    def make() -> tuple[Request, list[list[int]]]:
        check_sizes(llm, [text for _, text in pairs])
        tokens = [reranker.pair(llm.tokenizer, *pair, body.instruction) for pair in pairs]
        return llm.reranking_request(tokens), tokens

    def written(answer: PrefillAnswer) -> Any:
        return write(answer.request.result, answer)

    return await prefilled(http, body, body.call_options(), make, written)


def _end(answer: PrefillAnswer) -> dict[str, Any]:
    return {"model": answer.model, "usage": answer.usage()}
