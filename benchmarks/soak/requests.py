"""Valid and invalid requests of clients, and the allowed answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

WITNESS = {"prompt": "The KV cache is", "max_tokens": 24, "temperature": 0}
CONTEXT = 8192  # of the model under test
IMPATIENT_S = (0.01, 2.0)  # range of times after which a client disconnects
KEPT = 20  # unexpected answers that are reported in full
RETURNING = 150  # prompts that come again and again, a few of them most often


def documented(status: int, body: bytes) -> bool:
    """Whether a server error is allowed: only that of the request's deadline is, while the engine runs."""
    return status < 500 or (status == 504 and b'"code":"timeout"' in body)


@dataclass(frozen=True)
class Shot:
    """One request. `statuses` are the allowed statuses of its answer."""

    path: str
    content: bytes
    statuses: tuple[int, ...]
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


@dataclass
class Ledger:
    """Counts of requests, and all unexpected answers."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    surprises: list[str] = field(default_factory=list[str])
    surprised: int = 0
    texts: dict[int, str] = field(default_factory=dict[int, str])  # first answers to the prompts that come again

    def count(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def surprise(self, text: str) -> None:
        self.surprised += 1
        if len(self.surprises) < KEPT:
            self.surprises.append(text)


def shot(path: str, statuses: tuple[int, ...], **body: Any) -> Shot:
    return Shot(path, json.dumps(body).encode(), statuses)


FINE = (200, 429)
TIMED = (*FINE, 504)
WRONG = (400, 404, 422)


def tokens(rng: random.Random, least: float = 0) -> list[int]:
    """A random prompt of at least 2**`least` tokens, whose length is log-uniform: mostly short, sometimes long."""
    return [rng.randrange(100, 40_000) for _ in range(round(2 ** rng.uniform(least, 10.5)))]


def text_of(rng: random.Random) -> str:
    return " ".join(
        rng.choice(("why", "is", "the", "sky", "blue", "né", "空", "🙂", "\n")) for _ in range(rng.randint(1, 60))
    )


def completion(rng: random.Random) -> Shot:
    more = {
        "temperature": rng.choice((0, 0.7, 1.5)),
        "n": rng.choice((1, 1, 1, 2, 4)),
        "logprobs": rng.choice((None, 3)),
    }
    return shot(
        "/v1/completions",
        TIMED,
        prompt=tokens(rng),
        max_tokens=rng.randint(1, 60),
        stream=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
        priority=rng.randint(-2, 2),
        **more,
    )


def batch(rng: random.Random) -> Shot:
    return shot("/v1/completions", TIMED, prompt=[text_of(rng) for _ in range(rng.randint(2, 12))], max_tokens=8)


def chat(rng: random.Random) -> Shot:
    messages = [{"role": "user", "content": text_of(rng)}]
    stop = rng.choice((None, ["\n"], ["a", "b"]))
    return shot("/v1/chat/completions", TIMED, messages=messages, max_tokens=rng.randint(1, 40), stop=stop)


def grammar(rng: random.Random) -> Shot:
    schema = {"type": "object", "properties": {f"p{rng.randrange(50)}": {"type": "integer"}}, "required": []}
    form = rng.choice(
        (
            {"regex": f"[a-{rng.choice('xyz')}]{{1,{rng.randint(2, 20)}}}"},
            {"choice": [text_of(rng)[:20] for _ in range(3)]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        )
    )
    messages = [{"role": "user", "content": text_of(rng)}]
    return shot("/v1/chat/completions", TIMED, messages=messages, max_tokens=30, stream=rng.random() < 0.5, **form)


def technique(rng: random.Random) -> Shot:
    how = rng.choice(({"name": "repeat", "sinks": 4}, {"name": "repeat", "times": 3}, "best-of", "plain"))
    return shot("/v1/completions", TIMED, prompt=tokens(rng)[:300], max_tokens=12, method=how)


def deadline(rng: random.Random) -> Shot:
    return shot(
        "/v1/completions",
        TIMED,
        prompt=tokens(rng),
        max_tokens=400,
        timeout=rng.uniform(0.01, 1),
        stream=rng.random() < 0.5,
    )


def too_long(rng: random.Random) -> Shot:
    if rng.random() < 0.2:
        return Shot("/v1/completions", b"x" * (9 << 20), (413,))
    return shot("/v1/completions", (400,), prompt=[7] * rng.randint(CONTEXT, 3 * CONTEXT), max_tokens=5)


def malformed(rng: random.Random) -> Shot:
    whole = chat(rng).content
    content = rng.choice((whole[: rng.randrange(len(whole))], b"\xff" + whole, b"[" * 3000, b"null", b"{}", b""))
    return Shot(rng.choice(("/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")), content, WRONG)


def wrong_field(rng: random.Random) -> Shot:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    wrong: dict[str, Any] = rng.choice(
        (
            {"temperature": "hot"},
            {"n": 0},
            {"messages": []},
            {"model": "gpt-9"},
            {"stop": [""]},
            {"logit_bias": {"x": 1}},
            {"regex": "[0-9"},
            {"method": {"name": "repeat", "times": 10**9}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}, "strict": True}}},
            {"tools": [{"type": "function"}]},
            {"timeout": -1},
        )
    )
    return shot("/v1/chat/completions", WRONG, **(body | wrong))


def aside(rng: random.Random) -> Shot:
    return rng.choice(
        (
            shot("/tokenize", (200,), prompt=text_of(rng)),
            shot("/detokenize", (200,), tokens=[1, 2, 3]),
            shot("/v1/responses", TIMED, input=text_of(rng), max_output_tokens=5),
        )
    )


KINDS: dict[Callable[[random.Random], Shot], int] = {
    completion: 6,
    batch: 1,
    chat: 3,
    grammar: 2,
    technique: 1,
    deadline: 2,
    too_long: 1,
    malformed: 2,
    wrong_field: 2,
    aside: 1,
}


async def client(http: httpx.AsyncClient, rng: random.Random, ledger: Ledger, witness: str) -> None:
    """Send one request after another, forever. Some disconnect before the answer, some have a known answer."""
    while True:
        if rng.random() < 0.05:
            await _same_text(http, ledger, witness)
            continue
        if rng.random() < 0.2:
            await _returning(http, ledger, int(RETURNING * rng.random() ** 2))
            continue
        make = rng.choices(list(KINDS), list(KINDS.values()))[0]
        one, patience = make(rng), rng.uniform(*IMPATIENT_S) if rng.random() < 0.25 else None
        try:
            async with asyncio.timeout(patience):
                await _fire(http, make.__name__, one, ledger)
            ledger.count(make.__name__)
        except TimeoutError:
            ledger.count("gone")


async def _fire(http: httpx.AsyncClient, kind: str, one: Shot, ledger: Ledger) -> None:
    try:
        async with http.stream("POST", one.path, content=one.content, headers=one.headers) as answer:
            body = await answer.aread()
    except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError) as error:
        if 413 not in one.statuses:  # an unread body closes the connection, at times before the answer arrives
            ledger.surprise(f"{kind}: {type(error).__name__} {error}")
        return
    if answer.status_code not in one.statuses or not documented(answer.status_code, body):
        ledger.surprise(f"{kind}: {answer.status_code} {body[:200]!r} to {one.content[:300]!r}")
    elif answer.status_code == 429 and "retry-after" not in answer.headers:
        ledger.surprise(f"{kind}: 429 without Retry-After")


async def _same_text(http: httpx.AsyncClient, ledger: Ledger, witness: str) -> None:
    answer = await http.post("/v1/completions", json=WITNESS)
    ledger.count("witness")
    if answer.status_code == 200 and text(answer) != witness:
        ledger.surprise(f"witness: {text(answer)!r} in place of {witness!r}")


async def _returning(http: httpx.AsyncClient, ledger: Ledger, number: int) -> None:
    """Ask one of the prompts that come again, whose KV may lie in any tier by now. The text must be that of before."""
    body = {"prompt": tokens(random.Random(number), 6), "max_tokens": 8, "temperature": 0}
    answer = await http.post("/v1/completions", json=body)
    ledger.count("returning")
    if answer.status_code == 200 and (found := text(answer)) != (known := ledger.texts.setdefault(number, found)):
        ledger.surprise(f"returning {number}: {found!r} in place of {known!r}")
    elif not documented(answer.status_code, answer.content):
        ledger.surprise(f"returning {number}: {answer.status_code} {answer.content[:200]!r}")


def text(answer: httpx.Response) -> str:
    """The text of a completion."""
    return answer.json()["choices"][0]["text"]
