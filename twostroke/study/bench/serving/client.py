"""Streamed requests, and when each of their tokens came: one, or all of a load test."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from twostroke.engine.timings import Timings
from twostroke.study.traffic.requests import ClosedLoop, OpenLoop, Replay, TokenRequest

INTERRUPTED = "interrupted"


@dataclass
class Outcome:
    """The outcome of one request. Times are in seconds from the start of the test."""

    input_tokens: int
    asked_tokens: int
    due: float = 0.0  # when it was to be sent, which counts as its arrival
    sent: float | None = None  # when it was sent
    tokens: list[float] = field(default_factory=list[float])  # when each of its tokens came
    end: float = 0.0  # when its answer ended, or it failed
    finish: str | None = None  # the server's reason for the end of the answer; None if it did not end
    error: str | None = None  # the kind of failure
    cached: int | None = None  # prompt tokens that the server had in its prefix cache, if it says
    queue_s: float | None = None  # how long it waited before it was computed on, if the server says

    @property
    def timings(self) -> Timings:
        """When the tokens came to the client."""
        return Timings(arrival=self.due, tokens=self.tokens)


class Client:
    """Sends requests to one model. Reading an event takes about 0.1 ms, most of it in httpx; the figure `client_cpu`
    says how busy the client was."""

    def __init__(self, http: httpx.AsyncClient, model: str, timeout_s: float) -> None:
        self._http, self._model, self._timeout_s = http, model, timeout_s
        self.began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self.began

    async def send(self, ask: TokenRequest, outcome: Outcome) -> None:
        """Fill in the outcome. Errors of the server are noted there, not raised. Raises CancelledError."""
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            # Usage in every event gives its number of tokens: a server may send several at once.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        outcome.sent = self.now()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, outcome)
            if outcome.error is None and outcome.finish is None:
                outcome.error = "cut off"
        except TimeoutError:
            outcome.error = "timeout"
        except httpx.HTTPError as error:
            outcome.error = f"connection: {type(error).__name__}"
        except asyncio.CancelledError:
            outcome.error = INTERRUPTED
            raise
        finally:
            outcome.end = self.now()

    async def _stream(self, body: dict[str, Any], outcome: Outcome) -> None:
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                outcome.error = f"status {answer.status_code} {_code(answer)}".strip()
                return
            rest = b""
            async for piece in answer.aiter_bytes():
                now = self.now()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        read(data, now, outcome)


def read(data: bytes, now: float, outcome: Outcome) -> None:
    """Take one event. Without usage in it, text counts as one token."""
    try:
        event = json.loads(data)
        if (error := event.get("error")) is not None:
            outcome.error = f"stream: {error.get('code') or error.get('type') or 'error'}"
            return
        usage, choices = event.get("usage"), event.get("choices")
        choice = choices[0] if choices else {}
        if usage:
            new = usage["completion_tokens"] - len(outcome.tokens)
            outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", outcome.cached)
        else:
            new = int(bool(choice.get("text")))
        outcome.tokens += [now] * new
        outcome.finish = choice.get("finish_reason") or outcome.finish
        if (queue_ms := (choice.get("timings") or {}).get("queue_ms")) is not None:
            outcome.queue_s = queue_ms / 1e3
    except (ValueError, KeyError, TypeError, AttributeError):
        outcome.error = "event that cannot be read"


def _code(answer: httpx.Response) -> str:
    """The server's own name of an error, or nothing."""
    try:
        return str(answer.json()["error"]["code"] or "")
    except (ValueError, KeyError, TypeError):
        return ""


@dataclass(frozen=True)
class LoadTest:
    """Every request that was sent. `cpu_s` is the processor time of this process during the test."""

    outcomes: list[Outcome]
    interrupted: bool
    cpu_s: float


async def drive(
    client: Client,
    asks: Sequence[TokenRequest],
    pattern: OpenLoop | Replay | ClosedLoop,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> LoadTest:
    """Send all. If cancelled (Ctrl-C), it returns the outcomes so far; requests in flight count as interrupted."""
    outcomes = [Outcome(len(ask.prompt), ask.output_tokens) for ask in asks]

    async def one(ask: TokenRequest, outcome: Outcome) -> None:
        await client.send(ask, outcome)
        progress()

    async def worker(pairs: Iterator[tuple[TokenRequest, Outcome]]) -> None:
        for ask, outcome in pairs:
            outcome.due = client.now()
            await one(ask, outcome)

    pairs = zip(asks, outcomes, strict=True)
    used, client.began, interrupted = time.process_time(), time.perf_counter(), False
    try:
        async with asyncio.TaskGroup() as tasks:
            if isinstance(pattern, ClosedLoop):
                for _ in range(pattern.concurrency):
                    tasks.create_task(worker(pairs))
            else:
                for due, (ask, outcome) in zip(pattern.times(len(asks), seed), pairs, strict=True):
                    outcome.due = due
                    await asyncio.sleep(due - client.now())
                    tasks.create_task(one(ask, outcome))
    except asyncio.CancelledError:
        interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    return LoadTest([one for one in outcomes if one.sent is not None], interrupted, time.process_time() - used)
