"""Limits over HTTP: one rule for a prompt and its answer, long answers that end, and numbers that JSON has."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM
from twostroke.models.checkpoints.resolve import open_checkpoint

PAGES = 12
LIMIT = PAGES * 16  # entries of the pool, much less than the model's context


@pytest.fixture(scope="module")
def short(tiny_directory: Callable[[str], Path]) -> Iterator[Serving]:
    """A server whose pool is smaller than the context."""
    directory = str(tiny_directory("llama"))
    page_bytes = LLM(directory, kv_bytes=1 << 20, threads=1).pool.page_bytes
    with serving(LLM(directory, kv_bytes=PAGES * page_bytes, threads=1)) as running:
        yield running


def strictly(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for NaN and Infinity, which are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def ask(server: Serving, prompt: object, **fields: Any) -> httpx.Response:
    with server.http() as http:
        return http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "ignore_eos": True} | fields)


def test_models_say_what_fits(short: Serving, server: Serving) -> None:
    for running, limit in ((short, LIMIT), (server, 2048)):
        with running.http() as http:
            for model in http.get("/v1/models").json()["data"]:
                assert model["max_model_len"] == limit
            assert http.get("/v1/models/tiny").json()["max_model_len"] == limit
            assert http.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == limit


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_long_answer_ends_with_length(n: int, stream: bool, short: Serving) -> None:
    prompt, most = [5] * 20, LIMIT - 20
    response = ask(
        short,
        prompt,
        max_tokens=100_000,
        n=n,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
    )
    assert response.status_code == 200, response.text
    if not stream:
        body = response.json()
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * n
        assert body["usage"]["completion_tokens"] == n * most
        assert n > 1 or body["usage"]["total_tokens"] == LIMIT
        return
    events = [strictly(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    assert not any("error" in event for event in events)
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert reasons == ["length"] * n
    assert events[-1]["usage"]["completion_tokens"] == n * most


@pytest.mark.parametrize("where", ["pool", "context"])
def test_one_rule_at_the_limit(where: str, short: Serving, server: Serving) -> None:
    running, limit = (short, LIMIT) if where == "pool" else (server, 2048)
    for length in (limit - 2, limit - 1):
        body = ask(running, [5] * length, max_tokens=5).json()
        assert body["usage"]["total_tokens"] == limit
        assert body["choices"][0]["finish_reason"] == "length"
    for length in (limit, limit + 1):
        response = ask(running, [5] * length, max_tokens=5)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(
            f"the prompt has {length} tokens; at most {limit - 1} leave room for an answer"
        )


@pytest.mark.parametrize("where", ["pool", "context"])
def test_every_route_says_that_a_prompt_is_too_long(where: str, short: Serving, server: Serving) -> None:
    """By the code that clients look for when they shorten a conversation."""
    running, limit = (short, LIMIT) if where == "pool" else (server, 2048)
    long = [5] * (limit + 1)
    asked = {"/completion": "prompt", "/v1/embeddings": "input", "/embedding": "content", "/v1/contexts": "prompt"}
    with running.http() as http:
        for path, field in asked.items():
            answer = http.post(path, json={"model": "tiny", field: long})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), path


def test_a_chat_at_the_limit(short: Serving) -> None:
    """The same rule, counted by what the template makes."""

    def chat(letters: int) -> httpx.Response:
        messages = [{"role": "user", "content": "z" * letters}]
        with short.http() as http:
            return http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "ignore_eos": True})

    around = chat(1).json()["usage"]["prompt_tokens"] - 1
    for total in (LIMIT - 2, LIMIT - 1):
        body = chat(total - around).json()
        assert body["usage"]["prompt_tokens"] == total
        assert (body["usage"]["total_tokens"], body["choices"][0]["finish_reason"]) == (LIMIT, "length")
    for total in (LIMIT, LIMIT + 1):
        response = chat(total - around)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_every_technique_ends_with_length(short: Serving) -> None:
    for method in ("repeat", "reread", {"name": "best-of", "candidates": 2}, "speculative", "snap"):
        response = ask(short, [5, 6] * 10, max_tokens=1000, method=method)
        assert response.status_code == 200, (method, response.text)
        assert response.json()["choices"][0]["finish_reason"] == "length", method
    response = ask(short, [5] * (LIMIT - 9), max_tokens=5, method="repeat")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.fixture(scope="module")
def damaged(tiny_directory: Callable[[str], Path]) -> Iterator[Serving]:
    """A model whose embedding of token 200 is NaN."""
    checkpoint = open_checkpoint(str(tiny_directory("qwen2")))
    embedding = checkpoint.stored["embed"]
    values = embedding.data.copy()
    values.view("<f4")[200, 3] = math.nan
    stored = {**checkpoint.stored, "embed": replace(embedding, data=values)}
    with serving(LLM(replace(checkpoint, stored=stored), kv_bytes=16 << 20, threads=1)) as running:
        yield running


@pytest.mark.parametrize("fields", [{}, {"logprobs": 3}, {"temperature": 1, "top_p": 0.9}, {"n": 2}])
def test_a_model_that_computes_nan(fields: dict[str, Any], damaged: Serving) -> None:
    """It is an error with a code, for the requests concerned; the answers of others are JSON."""
    response = ask(damaged, [7, 200, 9], max_tokens=4, **fields)
    assert response.status_code == 500
    error = strictly(response.text)["error"]
    assert (error["type"], error["code"]) == ("server_error", "model_computes_nan")
    assert "computes NaN: its file may be damaged" in error["message"]
    bias = {"200": -100}
    response = ask(damaged, [7, 9], max_tokens=4, logit_bias=bias, **fields)
    assert response.status_code == 200
    assert strictly(response.text)["usage"]["completion_tokens"] == 4 * fields.get("n", 1)


def test_a_stream_that_meets_nan(damaged: Serving) -> None:
    """Nothing was sent yet, so the status is that of the error."""
    response = ask(damaged, [7, 200, 9], max_tokens=4, stream=True)
    assert (response.status_code, strictly(response.text)["error"]["code"]) == (500, "model_computes_nan")
