"""/v1/embeddings; /v1/classify in vLLM's form; /v1/rerank and /v1/score in those of Jina, Cohere and vLLM."""

import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from twostroke.api.prefills import broadcast
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.errors import ApiError, invalid
from twostroke.server.openai.schemas.base_model import Neutral, listed, whole_number
from twostroke.server.openai.schemas.completions import MAX_PROMPTS, prompts
from twostroke.server.prefills import (
    PrefillBody,
    begin_prefills,
    check_sizes,
    embed,
    prefilled,
    require_texts,
    usage_of,
)

router = APIRouter()


class ClassifyBody(PrefillBody):
    """Texts or token ids."""

    UNSUPPORTED: ClassVar[Neutral] = {"messages": (), "truncate_prompt_tokens": ()}
    input: Annotated[Any, BeforeValidator(prompts)]


class EmbeddingsBody(ClassifyBody):
    """Texts or token ids. `prompt_name` is the name of a text of the model's that comes before each ("query")."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1), BeforeValidator(whole_number)] = None
    prompt_name: str | None = None
    normalize: bool | None = None  # without it, as the model's files say


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Embeddings of texts."""

    def write(made: list[np.ndarray], request: Request) -> dict[str, Any]:
        coded = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(one) if coded else one.tolist()}
            for index, one in enumerate(made)
        ]
        return {"object": "list", "data": data, "model": body.model or engine.name, "usage": usage_of(request)}

    return await embed(
        http, body, body.input, write,
        prompt=body.prompt_name, dimensions=body.dimensions, normalized=body.normalize,
    )  # fmt: skip


def _base64(vector: np.ndarray) -> str:
    """Little-endian float32, as OpenAI's client reads it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


@router.post("/v1/classify")
@router.post("/classify")
async def classify(body: ClassifyBody, http: HttpRequest) -> Response:
    """The class of each text, and the probabilities of all."""
    engine = begin_prefills(http, body, "texts are classified")
    llm, classifier = engine.llm, engine.llm.classifier
    if classifier is None:
        message = f"{engine.name} has no head that classifies: ask for a choice with /v1/chat/completions instead"
        raise ApiError(400, message, code="no_classifier")
    require_texts(body.input)

    def make() -> tuple[Request, list[list[int]]]:
        check_sizes(llm, body.input)
        inputs = [classifier.embedder.encode(llm.tokenizer, text) for text in body.input]
        return llm.classifying_request(inputs), inputs

    def write(request: Request) -> dict[str, Any]:
        data: list[dict[str, Any]] = []
        for index, one in enumerate(map(classifier.finish, request.result)):
            scores = list(one.scores.values())
            data.append({"index": index, "label": one.label, "probs": scores, "num_classes": len(scores)})
        head = {"id": f"classify-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
        return {**head, "model": body.model or engine.name, "data": data, "usage": usage_of(request)}

    return await prefilled(http, body, make, write)


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

    def write(scores: Sequence[float]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
            for index in order
        ]
        return {"id": f"rerank-{secrets.token_hex(16)}", "object": "list", "results": results}

    return await _rank(http, body, lambda: [(body.query, text) for text in body.documents], write)


@router.post("/v1/score")
@router.post("/score")
async def score(body: ScoreBody, http: HttpRequest) -> Response:
    """A number from 0 to 1 for each pair."""

    def write(scores: Sequence[float]) -> dict[str, Any]:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
        return {**head, "data": data}

    return await _rank(http, body, lambda: broadcast(body.text_1, body.text_2), write)


async def _rank(
    http: HttpRequest,
    body: RankingBody,
    pairs_of: Callable[[], list[tuple[str, str]]],
    write: Callable[[Sequence[float]], dict[str, Any]],
) -> Response:
    engine = begin_prefills(http, body, "documents are ranked")
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

    def written(request: Request) -> dict[str, Any]:
        return write(request.result) | {"model": body.model or engine.name, "usage": usage_of(request)}

    return await prefilled(http, body, make, written)
