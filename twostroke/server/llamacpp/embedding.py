"""/embedding: llama.cpp's own form of embeddings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator

from twostroke.engine.request import Request
from twostroke.server.openai.schemas.base_model import whole_number
from twostroke.server.openai.schemas.completions import prompts
from twostroke.server.prefills import PrefillBody, embed

router = APIRouter()


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
