"""The base of all answers: an id, usage, timings, and two forms, whole and as a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from pydantic_core import to_json

from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.timings import Pace
from twostroke.kv.pages import TIERS
from twostroke.methods.method import method_facts
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.active_call import ActiveCall
from twostroke.server.errors import ApiError
from twostroke.server.tools.parser import ChoiceParser

MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON lacks; OpenAI writes the same


class Answer(ABC):
    """Takes tokens as they come and writes them as an API does.

    As a stream it is `opening`, then `events` of every token, then `closing`. Otherwise `add_token` takes every token,
    and `body` is the response's. Each token is counted once (`count`).
    """

    operation = "chat"  # as OpenTelemetry's conventions call it
    done_marker = True  # whether a stream ends with [DONE]
    media_type = "text/event-stream"

    def __init__(self, prefix: str, model: str, active_call: ActiveCall, n: int) -> None:
        """`prefix` begins the id; `model` is what the client called the model; `n` is choices of each prompt."""
        self.id = f"{prefix}{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model, self.active_call, self.n = model, active_call, n
        self.output_tokens = 0
        # called when the answer is complete; their results are fields of the response, which are in `more`
        self.on_finish = list[Callable[[], Awaitable[dict[str, Any]]]]()
        # tokens: by prompt and choice, if anything is called then
        self.tokens, self.more = dict[tuple[int, int], list[Token]](), dict[str, Any]()
        self.parsers = list[ChoiceParser]()  # of an API that sets thoughts apart, one for each choice

    def opening(self) -> Iterator[dict[str, Any]]:
        """The first events of a stream."""
        yield from ()

    @abstractmethod
    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        """The events of a stream for one more token of the prompt with this index."""

    async def finish(self) -> None:
        """Called after the last token, before `closing` or `body`."""
        for fields in self.on_finish:
            self.more |= await fields()

    def count(self, prompt: int, token: Token) -> None:
        """Count a token."""
        self.output_tokens += 1
        if self.on_finish:
            self.tokens.setdefault((prompt, token.choice), []).append(token)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The last events of a stream."""
        yield from ()

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The HTTP response's body, after every token was taken."""

    @abstractmethod
    def add_token(self, prompt: int, token: Token) -> None:
        """Take a token of an answer that is not streamed."""

    def encode(self, event: dict[str, Any]) -> bytes:
        """An event as a server-sent event."""
        return b"data: " + to_json(event, inf_nan_mode="null") + b"\n\n"

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """The event for an error in a stream that has begun."""
        return error.body()

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and choices so far."""
        requests = self.active_call.requests
        prompt = sum(request.prompt_tokens for request in requests)
        cached = self.cached_by_tier()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.output_tokens,
            "total_tokens": prompt + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values()), "cached_tokens_by_tier": cached},
        } | ({"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}} if self.parsers else {})

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts so far."""
        return sum(parser.reasoning_tokens for parser in self.parsers)

    def cached_by_tier(self) -> dict[str, int]:
        """Tokens of the prompts that were found and not computed, by the tier in which they were.

        A repeated prompt, or one that was preempted, may be found more than once: its tokens count where they were
        farthest away.
        """
        cached = dict.fromkeys(TIERS, 0)
        for request in self.active_call.requests:
            left = request.prompt_tokens
            for tier in reversed(TIERS):
                found = min(left, request.cached_by_tier[tier])
                cached[tier] += found
                left -= found
        return cached


def own_fields(request: Request) -> dict[str, Any]:
    """The fields of a finished answer that are this server's own: its timings, and what its technique counted."""
    return {"timings": timings(request)} | counted(request)


def counted(request: Request) -> dict[str, Any]:
    """What a finished request's technique counted, as a field; none if it counted nothing."""
    facts = {name: value for name, value in method_facts(request.result).items() if _numbers(value)}
    return {"method_facts": facts} if facts else {}


def _numbers(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_numbers, value)))


def timings(request: Request) -> dict[str, float | None]:
    """When things happened, in milliseconds; of the first choice, by the definitions of `engine/timings.py`."""
    times, pace = request.timings, Pace.of(request.timings, 0)
    first = times.tokens[0] if times.tokens else None
    last = times.tokens[-1] if times.tokens else None
    return {
        "queue_ms": _ms(times.arrival, times.scheduled),
        "prefill_ms": _ms(times.scheduled, first),
        "ttft_ms": _ms(times.arrival, first),
        "decode_ms": _ms(first, last),
        "itl_mean_ms": None if pace.itl_mean_s is None else round(pace.itl_mean_s * 1e3, 3),
        "itl_p99_ms": None if pace.itl_p99_s is None else round(pace.itl_p99_s * 1e3, 3),
    }


def _ms(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else round((stop - start) * 1e3, 3)


def logprob(value: float | None) -> float:
    """A log-probability as JSON can hold it. The request must have asked for it."""
    assert value is not None
    return max(value, MIN_LOGPROB)


def logprob_entry(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """A token with its log-probability, and the likeliest tokens in its place, as OpenAI and Ollama write them."""
    top = [_probability(tokenizer, id, value) for id, value in token.top_logprobs or ()]
    return {**_probability(tokenizer, token.id, token.logprob), "top_logprobs": top}


def _probability(tokenizer: Tokenizer, id: int, value: float | None) -> dict[str, Any]:
    data = list(tokenizer.token_bytes(id, skip_special=False))
    return {"token": tokenizer.token_text(id), "logprob": logprob(value), "bytes": data}


def prompt_logprobs(request: Request, tokenizer: Tokenizer, count: int | None) -> dict[str, Any]:
    """vLLM's field, where it was asked for: for each token but the first, its own entry and those of the likeliest."""
    if count is None:
        return {}
    entries: list[dict[str, Any] | None] = []
    for score in request.prompt_scores or ():
        if score is None:
            entries.append(None)
            continue
        ranked = [(score.id, score.logprob, score.rank)]
        ranked += [(id, value, rank) for rank, (id, value) in enumerate(score.top[:count], 1) if id != score.id]
        entries.append(
            {
                str(id): {"logprob": logprob(value), "rank": rank, "decoded_token": tokenizer.token_text(id)}
                for id, value, rank in ranked
            }
        )
    return {"prompt_logprobs": entries}
