"""The way of a call that asks for embeddings, the same for every API: one request of prefills, and no token."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from fastapi import Request as HttpRequest
from fastapi import Response

from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.server.active_call import ActiveCall, CallOptions
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.engine_requests import Prepared, check_size, choose_method, require_plain
from twostroke.server.errors import ApiError
from twostroke.server.generate import generate
from twostroke.server.openai.schemas.common import salt_bytes
from twostroke.server.openai.schemas.completions import MAX_PROMPTS

TextOrTokens = str | list[int]


class PrefillFields(Protocol):
    """What bodies of all APIs have; `cache_salt` separates prefixes from those of other callers."""

    @property
    def model(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...


class PrefillAnswer(Answer):
    """What a request of prefills has computed, written once it is done."""

    operation = "embeddings"

    def __init__(
        self, engine: AsyncEngine, model: str | None, active_call: ActiveCall, write: Callable[["PrefillAnswer"], Any]
    ) -> None:
        """`write` makes the response's body, off the event loop."""
        super().__init__("", model or engine.name, active_call, 1)
        self._engine, self._write = engine, write
        self._made: Any = None

    @property
    def request(self) -> Request:
        return self.active_call.requests[0]

    def usage(self) -> dict[str, Any]:
        """Its tokens: all are of the prompt."""
        count = self.request.prompt_tokens
        return {"prompt_tokens": count, "total_tokens": count}

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        yield from ()

    def add_token(self, prompt: int, token: Token) -> None:
        raise AssertionError("a request of prefills makes no token")

    async def finish(self) -> None:
        await super().finish()
        self._made = await self._engine.run_in_thread(lambda: self._write(self))

    def body(self) -> dict[str, Any]:
        return self._made

    def whole(self, more: dict[str, Any]) -> Any:
        return self._made | more if isinstance(self._made, dict) else self._made


async def embed(
    http: HttpRequest,
    body: PrefillFields,
    inputs: Sequence[TextOrTokens],
    write: Callable[[list[np.ndarray], PrefillAnswer], Any],
    options: CallOptions | None = None,
    *,
    prompt: str | None = None,
    dimensions: int | None = None,
    normalized: bool | None = None,
    truncate: bool = False,
) -> Response:
    """Compute embeddings of texts or token ids; `write` makes the response's body of them. Raises ApiError.

    `prompt`, `dimensions` and `normalized` are as for `LLM.embed`; `truncate` cuts texts longer than the context.
    """
    engine = prefilling_engine(http, body, "embeddings are computed")
    require_texts(inputs)
    llm, embedder = engine.llm, engine.llm.embedder

    def make() -> tuple[Request, list[list[int]]]:
        if not truncate:
            check_sizes(llm, inputs)
        most = llm.max_model_len if truncate else None
        encoded = [embedder.encode(llm.tokenizer, text, prompt, most) for text in inputs]
        embedder.finish(np.zeros(embedder.size, np.float32), dimensions)  # refused before work starts
        return llm.embedding_request(encoded), encoded

    def finished(answer: PrefillAnswer) -> Any:
        return write([embedder.finish(one, dimensions, normalized) for one in answer.request.result], answer)

    return await prefilled(http, body, options or CallOptions(1), make, finished)


def prefilling_engine(http: HttpRequest, body: PrefillFields, what: str) -> AsyncEngine:
    """The engine, once its model is the one that the body names. Raises ApiError, in which `what` is done."""
    engine: AsyncEngine = http.app.state.engine
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
    body: PrefillFields,
    options: CallOptions,
    make: Callable[[], tuple[Request, list[list[int]]]],
    write: Callable[[PrefillAnswer], Any],
) -> Response:
    """Run a request of prefills; `make` makes it and its inputs, `write` the response's body. Raises ApiError."""
    engine: AsyncEngine = http.app.state.engine
    salt = salt_bytes(body.cache_salt)

    def prepare() -> Prepared:
        request, inputs = make()
        request.cache_salt = salt
        return Prepared([request], inputs)

    def answer(_: Prepared, active_call: ActiveCall) -> Answer:
        return PrefillAnswer(engine, body.model, active_call, write)

    return await generate(http, options, prepare, answer)
