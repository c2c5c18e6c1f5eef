"""The API for asyncio: the same strokes and requests, awaited, while a thread steps the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from twostroke.api.llm import LLM, Completion, TextOrTokens
from twostroke.engine.engine_thread import EngineThread, Update
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.methods import Method
from twostroke.models.checkpoints.catalog import DEFAULT_MODEL
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.sampling.params import SamplingParams, sampling_params


class AsyncLLM:
    """An `LLM` for asyncio. As an async context manager it is closed at the end.

    Any number of tasks, of any event loops, may use it, and threads may use its `llm` meanwhile: all requests are
    batched. The engine runs on a separate thread, as in the HTTP server (`engine.thread`), and tokenization on
    other threads, so the event loop never waits. A task that is cancelled ends its request.

    Attributes:
        llm: the model.
    """

    def __init__(self, model: str | Checkpoint | LLM = DEFAULT_MODEL, **options: Any) -> None:
        """Use an open `LLM`, or open one with its arguments, which takes a while: see `open`."""
        if isinstance(model, LLM) and options:
            raise InvalidRequest(f"this model is open already: give it {', '.join(options)} when it is opened")
        self._owns = not isinstance(model, LLM)
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._thread = EngineThread(self.llm.engine, publish, lambda *_: None)
        self._thread.start()

    @classmethod
    async def open(cls, model: str | Checkpoint = DEFAULT_MODEL, **options: Any) -> AsyncLLM:
        """Open a model on another thread, with the arguments of `LLM`."""
        opened = cls(await asyncio.to_thread(lambda: LLM(model, **options)))
        opened._owns = True
        return opened

    async def prefill(self, prompt: TextOrTokens, after: KVCache | None = None, *, model: str | None = None) -> KVCache:
        """Stroke one, as `LLM.prefill`."""
        ((request, _),) = await self._run_all(lambda: [self.llm.prefill_request(prompt, after, model)])
        return request.result

    def decode(
        self, kv: KVCache, params: SamplingParams | None = None, *, model: str | None = None, **sampling: Any
    ) -> AsyncDecoding:
        """Stroke two, as `LLM.decode`: an async iterator of `Token`. Its errors are raised by the first token."""
        return AsyncDecoding(
            self._thread, lambda: self.llm.decode_request(kv, sampling_params(params, sampling), model)
        )

    async def generate(
        self,
        prompts: Sequence[TextOrTokens],
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Answer a list of prompts, as `LLM.generate`."""
        answered = await self._run_all(lambda: self.llm.requests(prompts, sampling_params(params, sampling), method))
        return [Completion.of(*one) for one in answered]

    def stream(
        self,
        prompt: TextOrTokens,
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> AsyncDecoding:
        """Answer one prompt token by token, as `LLM.stream`. Its errors are raised by the first token."""
        return AsyncDecoding(self._thread, lambda: self.llm.request(prompt, sampling_params(params, sampling), method))

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer messages through the chat template, as `LLM.chat`."""

        def prepare() -> list[Request]:
            prompt = self.llm.chat_prompt(messages)
            return [self.llm.request(prompt, sampling_params(params, sampling), method)]

        (answered,) = await self._run_all(prepare)
        return Completion.of(*answered)

    async def close(self) -> None:
        """End all requests and the thread. A model that was opened here is closed."""
        await asyncio.to_thread(self._thread.stop)
        if self._owns:
            self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run_all(self, prepare: Callable[[], list[Request]]) -> list[tuple[Request, list[Token]]]:
        """Run requests to their ends. Returns them with their tokens. Raises the first error."""
        answered: dict[Request, list[Token]] = {request: [] for request in await asyncio.to_thread(prepare)}
        async with aclosing(updates(self._thread, answered)) as news:
            async for update in news:
                answered[update.request] += update.tokens
        return list(answered.items())


class AsyncDecoding(AsyncIterator[Token]):
    """Tokens as they are made.

    Attributes:
        request: the request, with its timings, once the first token was asked for.
        tokens: the tokens taken so far.
    """

    def __init__(self, thread: EngineThread, prepare: Callable[[], Request]) -> None:
        self.request: Request | None = None
        self.tokens: list[Token] = []
        self._thread, self._prepare = thread, prepare
        self._iterator = self._run()

    async def __anext__(self) -> Token:
        token = await anext(self._iterator)
        self.tokens.append(token)
        return token

    async def _run(self) -> AsyncGenerator[Token]:
        self.request = await asyncio.to_thread(self._prepare)
        async with aclosing(updates(self._thread, [self.request])) as news:
            async for update in news:
                for token in update.tokens:
                    yield token

    async def close(self) -> None:
        """Stop early and free the pages."""
        await self._iterator.aclose()

    @property
    def text(self) -> str:
        """The first choice's text so far."""
        return "".join(token.text for token in self.tokens if token.choice == 0)

    @property
    def kv(self) -> KVCache:
        """The continued value, after the last token of `AsyncLLM.decode`. Raises InvalidRequest before that."""
        if self.request is None or (run := self.request.result) is None:
            raise InvalidRequest("there is no value yet: take all tokens first; only decode gives one")
        return run.kv


class Inbox:
    """The way of updates from the engine's thread to a task."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.updates: asyncio.Queue[Update] = asyncio.Queue()


async def updates(thread: EngineThread, requests: Iterable[Request]) -> AsyncGenerator[Update]:
    """Start requests and yield what each step did for them, until all are done. Raises the first error."""
    inbox, left = Inbox(), set(requests)
    try:
        for request in left:
            thread.submit(request, inbox)
        while left:
            update = await inbox.updates.get()
            yield update
            if update.error is not None:
                raise update.error
            if update.done:
                left.discard(update.request)
    finally:
        for request in left:
            thread.cancel(request)


def publish(updates: list[Update]) -> None:
    """Called by the engine's thread: one wake-up of an event loop for all of a step's updates for it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Update]] = {}
    for update in updates:
        by_loop.setdefault(update.owner.loop, []).append(update)
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver, own)
        except RuntimeError:  # the loop is closed, and its tasks with it
            continue


def _deliver(updates: list[Update]) -> None:
    for update in updates:
        update.owner.updates.put_nowait(update)
