"""The way of a call that prefills alone, the same for every API: one request, and no token."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BeforeValidator, Field

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.server.active_call import CallOptions
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.engine_requests import Prepared, check_size, choose_method, require_plain
from twostroke.server.errors import ApiError
from twostroke.server.generate import run_request
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.openai.schemas.base_model import LenientModel, warn_of_fields, whole_number
from twostroke.server.openai.schemas.common import CacheSalt, salt_bytes
from twostroke.server.openai.schemas.completions import MAX_PROMPTS


class PrefillBody(LenientModel):
    """The fields of every body that asks for prefills alone."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"user", "request_id", "metadata"})
    model: str | None = None
    cache_salt: CacheSalt = None
    priority: Annotated[int, Field(ge=-100, le=100), BeforeValidator(whole_number)] = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def begin_prefills(http: HttpRequest, body: PrefillBody, what: str) -> AsyncEngine:
    """The engine, once its model is the one that the body names. Raises ApiError, in which `what` is done."""
    engine: AsyncEngine = http.app.state.engine
    warn_of_fields(http, body)
    require_plain(choose_method(engine.name, body.model, None), what, "model")
    return engine


def require_texts(inputs: Sequence[Any]) -> None:
    """Raise ApiError unless there are some, and not too many."""
    if not inputs or len(inputs) > MAX_PROMPTS:
        raise ApiError(400, f"input must be 1 to {MAX_PROMPTS} texts, not {len(inputs)}", param="input")


def check_sizes(llm: LLM, inputs: Sequence[Any]) -> None:
    """Raise ApiError for a text that is certainly too long; token ids are counted later."""
    for text in inputs:
        if isinstance(text, str):
            check_size(llm, text)


async def prefilled(
    http: HttpRequest,
    body: PrefillBody,
    make: Callable[[], tuple[Request, list[list[int]]]],
    write: Callable[[Request], Any],
) -> Response:
    """Run a request of prefills. Raises ApiError or ClientDisconnected.

    `make` makes it and its inputs, and `write` the response's body of its result, both off the event loop.
    """
    engine: AsyncEngine = http.app.state.engine
    log, salt = call_log(http.scope), salt_bytes(body.cache_salt)

    def prepare() -> Prepared:
        request, inputs = make()
        request.cache_salt = salt
        return Prepared([request], inputs)

    options = CallOptions(1, False, body.priority, body.timeout)
    with engine.reserve_call(1) as active_call:
        active_call.trace.operation = "embeddings"
        request = await run_request(http, active_call, options, prepare)
        log.model = body.model or engine.name
        made = await engine.run_in_thread(lambda: write(request))
    return json_response(made | log.answer_fields if isinstance(made, dict) else made)


async def embed(
    http: HttpRequest,
    body: PrefillBody,
    inputs: Sequence[str | list[int]],
    write: Callable[[list[np.ndarray], Request], Any],
    *,
    prompt: str | None = None,
    dimensions: int | None = None,
    normalized: bool | None = None,
    truncate: bool = False,
) -> Response:
    """Compute embeddings of texts or token ids; `write` makes the response's body of them. Raises ApiError.

    `prompt`, `dimensions` and `normalized` are as for `LLM.embed`; `truncate` cuts texts longer than the context.
    """
    engine = begin_prefills(http, body, "embeddings are computed")
    require_texts(inputs)
    llm, embedder = engine.llm, engine.llm.embedder

    def make() -> tuple[Request, list[list[int]]]:
        if not truncate:
            check_sizes(llm, inputs)
        most = llm.max_model_len if truncate else None
        encoded = [embedder.encode(llm.tokenizer, text, prompt, most) for text in inputs]
        embedder.finish(np.zeros(embedder.size, np.float32), dimensions)  # refused before work starts
        return llm.embedding_request(encoded), encoded

    def finished(request: Request) -> Any:
        return write([embedder.finish(one, dimensions, normalized) for one in request.result], request)

    return await prefilled(http, body, make, finished)


def usage_of(request: Request) -> dict[str, int]:
    """Its tokens: all are of the prompt."""
    return {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}
