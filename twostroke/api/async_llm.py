"""The API for asyncio: the same strokes and requests, awaited, while a thread steps the engine."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from twostroke.api.completion import Completion
from twostroke.api.llm import LLM
from twostroke.api.scoring import TextOrTokens
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
        self._thread = EngineThread(self.llm.engine)
        self._thread.start(publish)

    @classmethod
    async def open(cls, model: str | Checkpoint = DEFAULT_MODEL, **options: Any) -> "AsyncLLM":
        """Open a model on another thread. Arguments and errors are those of `LLM`."""
        opened = cls(await asyncio.to_thread(lambda: LLM(model, **options)))
        opened._owns = True
        return opened

    async def prefill(self, prompt: TextOrTokens, after: KVCache | None = None, *, model: str | None = None) -> KVCache:
        """Stroke one: enter a text or token ids, after the entries of `after` if given.

        Arguments and result are those of `LLM.prefill`. If the task is cancelled, so is the request.

        Raises:
            InvalidRequest: nothing to enter, ids outside the vocabulary, or more tokens than the context holds.
            GeometryMismatch: `after` has another geometry. OutOfPages: no room. EngineStopped: the model is closed.
        """
        ((request, _),) = await self._run_all(lambda: [self.llm.prefill_request(prompt, after, model)])
        return request.result

    def decode(
        self, kv: KVCache, params: SamplingParams | None = None, *, model: str | None = None, **sampling: Any
    ) -> "AsyncDecoding":
        """Stroke two: continue a value token by token. Arguments are those of `LLM.decode`.

        Returns an async iterator of `Token`; at the end its `kv` is the continued value. The request starts when the
        first token is awaited.

        Raises, while it is iterated:
            InvalidRequest: a parameter is out of range, or n is not 1. ContextLengthExceeded: the value leaves no room
            for a token. EngineStopped: the model is closed.
        """
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
        """Answer a list of prompts (texts or token ids) in one batch. Arguments are those of `LLM.generate`.

        Raises:
            InvalidRequest: a prompt or a parameter is out of range, or a companion is missing. ContextLengthExceeded: a
            prompt leaves no room for an answer. OutOfPages: other values hold the room that a prompt needs.
            EngineStopped: the model is closed.
        """
        answered = await self._run_all(lambda: self.llm.requests(prompts, sampling_params(params, sampling), method))
        return [Completion.of(*one) for one in answered]

    def stream(
        self,
        prompt: TextOrTokens,
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> "AsyncDecoding":
        """Answer one prompt token by token. Arguments are those of `LLM.stream`.

        Returns an async iterator of `Token`, which raises the errors of `generate`. The request starts when the first
        token is awaited.
        """
        return AsyncDecoding(self._thread, lambda: self.llm.request(prompt, sampling_params(params, sampling), method))

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer a list of messages, [{"role": ..., "content": ...}, ...], through the model's chat template.

        A text is one message of the user. Raises the errors of `generate`, and InvalidRequest if there is no chat
        template or it refuses the messages. A thought is set apart from the text, as `thought`.
        """

        def prepare() -> list[Request]:
            prompt = self.llm.chat_prompt(messages)
            return [self.llm.request(prompt, self.llm.chat_params(prompt, sampling_params(params, sampling)), method)]

        (answered,) = await self._run_all(prepare)
        return Completion.of(*answered)

    async def close(self) -> None:
        """End all requests with EngineStopped, and the thread. A model that was opened here is closed."""
        await asyncio.to_thread(self._thread.stop)
        if self._owns:
            self.llm.close()

    async def __aenter__(self) -> "AsyncLLM":
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
    """An async iterator of tokens as they are made.

    Attributes:
        request: the request, with its timings; None until the first token is awaited.
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
        """End the request early and free its pages."""
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
    """Updates from the engine's thread for one task, queued on the task's event loop."""

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
    """Deliver a step's updates, in the engine's thread, with one wake-up of each event loop that some are for."""
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
