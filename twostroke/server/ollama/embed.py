"""/api/embed and /api/embeddings, its older form: embeddings of texts."""

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from twostroke.engine.request import Request
from twostroke.server.ollama.answers import nanoseconds
from twostroke.server.ollama.schemas import OllamaOptions
from twostroke.server.openai.schemas.base_model import listed, whole_number
from twostroke.server.prefills import PrefillBody, embed

router = APIRouter(prefix="/api")


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
