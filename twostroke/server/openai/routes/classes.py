"""/v1/classify: which class texts have, in vLLM's form."""

import secrets
import time
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator

from twostroke.engine.request import Request
from twostroke.server.embeddings import PrefillAnswer, check_sizes, prefilled, prefilling_engine, require_texts
from twostroke.server.errors import ApiError
from twostroke.server.openai.field_warnings import warn_of_fields
from twostroke.server.openai.routes.embeddings import PrefillBody
from twostroke.server.openai.schemas.base_model import Neutral
from twostroke.server.openai.schemas.completions import prompts

router = APIRouter()


class ClassifyBody(PrefillBody):
    """Texts or token ids."""

    UNSUPPORTED: ClassVar[Neutral] = {"truncate_prompt_tokens": (), "messages": ()}
    input: Annotated[Any, BeforeValidator(prompts)]


@router.post("/v1/classify")
@router.post("/classify")
async def classify(body: ClassifyBody, http: HttpRequest) -> Response:
    """The class of each text, and the probabilities of all."""
    warn_of_fields(http, body)
    engine = prefilling_engine(http, body, "texts are classified")
    llm, classifier = engine.llm, engine.llm.classifier
    if classifier is None:
        message = f"{engine.name} has no head that classifies: ask for a choice with /v1/chat/completions instead"
        raise ApiError(400, message, code="no_classifier")
    require_texts(body.input)

    def make() -> tuple[Request, list[list[int]]]:
        check_sizes(llm, body.input)
        inputs = [classifier.embedder.encode(llm.tokenizer, text) for text in body.input]
        return llm.classifying_request(inputs), inputs

    def write(answer: PrefillAnswer) -> dict[str, Any]:
        data: list[dict[str, Any]] = []
        for index, one in enumerate(map(classifier.finish, answer.request.result)):
            scores = list(one.scores.values())
            data.append({"index": index, "label": one.label, "probs": scores, "num_classes": len(scores)})
        head = {"id": f"classify-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
        return {**head, "model": answer.model, "data": data, "usage": answer.usage()}

    return await prefilled(http, body, body.call_options(), make, write)
