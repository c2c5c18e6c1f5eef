"""/v1/embeddings."""

import base64
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from twostroke.server.active_call import CallOptions
from twostroke.server.embeddings import PrefillAnswer, embed
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, whole_number
from twostroke.server.openai.schemas.common import CacheSalt
from twostroke.server.openai.schemas.completions import prompts

router = APIRouter(prefix="/v1")


class PrefillBody(LenientModel):
    """The fields of every body that asks for prefills alone."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"user", "request_id", "metadata"})
    model: str | None = None
    cache_salt: CacheSalt = None
    priority: Annotated[int, Field(ge=-100, le=100), BeforeValidator(whole_number)] = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def call_options(self) -> CallOptions:
        """How the call is to be served: a place in the queue for all of its texts."""
        return CallOptions(1, False, self.priority, self.timeout)


class EmbeddingsBody(PrefillBody):
    """Texts or token ids. `prompt_name` is the name of a text of the model's that comes before each ("query")."""

    UNSUPPORTED: ClassVar[Neutral] = {"messages": (), "truncate_prompt_tokens": ()}
    input: Annotated[Any, BeforeValidator(prompts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1), BeforeValidator(whole_number)] = None
    prompt_name: str | None = None
    normalize: bool | None = None  # without it, as the model's files say


@router.post("/embeddings")
async def embeddings(body: EmbeddingsBody, http: HttpRequest) -> Response:
    """Embeddings of texts."""
    warn_of_fields(http, body)

    def write(made: list[np.ndarray], answer: PrefillAnswer) -> dict[str, Any]:
        coded = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(one) if coded else one.tolist()}
            for index, one in enumerate(made)
        ]
        return {"object": "list", "data": data, "model": answer.model, "usage": answer.usage()}

    return await embed(
        http, body, body.input, write, body.call_options(),
        prompt=body.prompt_name, dimensions=body.dimensions, normalized=body.normalize,
    )  # fmt: skip


def _base64(vector: np.ndarray) -> str:
    """Little-endian float32, as OpenAI's client reads it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
