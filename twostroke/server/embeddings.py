"""The way of a call that asks for embeddings, the same for every API: one request of prefills, and no token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from twostroke.server.openai.schemas.completions import MAX_PROMPTS

TextOrTokens = str | list[int]


@dataclass(frozen=True)
class EmbeddingsCall:
    """What a body asks for.

    Attributes:
        model: what the client calls the model.
        inputs: texts or token ids.
        options: how the call is to be served.
        prompt: the name of the model's text that comes before each.
        dimensions, normalized: see `Embedder.finish`.
        truncate: cut texts that are longer than the context.
        salt: separates prefixes from those of other callers.
    """

    model: str | None
    inputs: Sequence[TextOrTokens]
    options: CallOptions
    prompt: str | None = None
    dimensions: int | None = None
    normalized: bool | None = None
    truncate: bool = False
    salt: bytes = b""


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
    http: HttpRequest, asked: EmbeddingsCall, write: Callable[[list[np.ndarray], PrefillAnswer], Any]
) -> Response:
    """Compute embeddings; `write` makes the response's body of them. Raises ApiError."""
    engine: AsyncEngine = http.app.state.engine
    require_plain(choose_method(engine.name, asked.model, None), "embeddings are computed", "model")
    require_texts(asked.inputs)
    llm, embedder = engine.llm, engine.llm.embedder

    def make() -> tuple[Request, list[list[int]]]:
        if not asked.truncate:
            check_sizes(llm, asked.inputs)
        most = llm.max_model_len if asked.truncate else None
        inputs = [embedder.encode(llm.tokenizer, text, asked.prompt, most) for text in asked.inputs]
        embedder.finish(np.zeros(embedder.size, np.float32), asked.dimensions)  # refused before work starts
        return llm.embedding_request(inputs), inputs

    def finished(answer: PrefillAnswer) -> Any:
        made = [embedder.finish(one, asked.dimensions, asked.normalized) for one in answer.request.result]
        return write(made, answer)

    return await prefilled(http, asked.model, asked.options, asked.salt, make, finished)


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
    model: str | None,
    options: CallOptions,
    salt: bytes,
    make: Callable[[], tuple[Request, list[list[int]]]],
    write: Callable[[PrefillAnswer], Any],
) -> Response:
    """Run a request of prefills; `make` makes it and its inputs, `write` the response's body. Raises ApiError."""
    engine: AsyncEngine = http.app.state.engine

    def prepare() -> Prepared:
        request, inputs = make()
        request.cache_salt = salt
        return Prepared([request], inputs)

    def answer(_: Prepared, active_call: ActiveCall) -> Answer:
        return PrefillAnswer(engine, model, active_call, write)

    return await generate(http, options, prepare, answer)
