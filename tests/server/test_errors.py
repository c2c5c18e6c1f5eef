"""Invalid requests, of any bytes, are answered with OpenAI's error object and the field's name."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from tests.server.conftest import Serving, asgi
from twostroke.api.llm import LLM
from twostroke.server.http.middleware import CallMiddleware
from twostroke.server.observability.metrics import Metrics
from twostroke.server.settings import Settings

JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
BASES = {"chat/completions": CHAT, "completions": TEXT, "responses": {"max_output_tokens": 2}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CASES: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("chat/completions", {"temperature": "hot"}, 400, "temperature"),
    ("chat/completions", {"temperature": -1}, 400, "temperature"),
    ("chat/completions", {"top_p": -0.1}, 400, "top_p"),
    ("chat/completions", {"top_p": False}, 400, "top_p"),
    ("chat/completions", {"n": 0}, 400, "n"),
    ("chat/completions", {"n": 1000}, 400, "n"),
    ("chat/completions", {"n": True}, 400, "n"),
    ("chat/completions", {"seed": 10**30}, 400, "seed"),
    ("chat/completions", {"max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", {"min_tokens": 3}, 400, "min_tokens"),
    ("chat/completions", {"stop": [""]}, 400, "stop[0]"),
    ("chat/completions", {"stop": 5}, 400, "stop"),
    ("chat/completions", {"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("chat/completions", {"logit_bias": {"999999": 1}}, 400, "logit_bias"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "hi"}]}, 400, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
    ("chat/completions", {"messages": None}, 400, "messages"),
    ("chat/completions", {"model": "gpt-9"}, 404, "model"),
    ("chat/completions", {"model": "tiny:nothing"}, 404, "model"),
    ("chat/completions", {"method": "nothing"}, 400, "method"),
    ("chat/completions", {"method": {"name": "repeat", "times": 10**9}}, 400, "method"),
    ("chat/completions", {"method": {"name": "repeat", "colour": 1}}, 400, "method"),
    ("chat/completions", {"tools": [TOOL], "tool_choice": "sometimes"}, 400, "tool_choice"),
    ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}, "strict": True}}},
        400,
        "response_format",
    ),
    ("chat/completions", {"regex": "[0-9"}, 400, "regex"),
    ("chat/completions", {"regex": "a", "choice": ["b"]}, 400, "choice"),
    ("chat/completions", {"functions": [{"name": "f"}]}, 400, "functions"),
    ("chat/completions", {"priority": 10**6}, 400, "priority"),
    ("chat/completions", {"max_tokens": 10**400}, 400, "max_tokens"),
    ("chat/completions", {"method": {"name": "drop", "window": 10**400}}, 400, "method"),
    ("completions", {"max_tokens": 10**400}, 400, "max_tokens"),
    ("responses", {"input": "hi", "max_output_tokens": 10**400}, 400, "max_output_tokens"),
    ("chat/completions", {"timeout": 0}, 400, "timeout"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": [1, "a"]}, 400, "prompt"),
    ("completions", {"prompt": [5, 999999]}, 400, None),
    ("completions", {"prompt": ""}, 400, None),
    ("completions", {"prompt": "\ud800"}, 400, None),
    ("responses", {"input": "hi", "prompt": {"id": "pmpt_1"}}, 400, "prompt"),
    ("completions", {"prompt": ["x"] * 3000}, 400, "prompt"),
    ("completions", {"prompt": ["x"] * 200}, 400, "n"),
    ("completions", {"prompt": [7] * 5000}, 400, None),
    ("completions", {"logprobs": 21}, 400, "logprobs"),
    ("completions", {"suffix": "!"}, 400, "suffix"),
    ("completions", {"best_of": 3}, 400, "best_of"),
    ("completions", {"best_of": 0}, 400, "best_of"),
    ("completions", {"best_of": 1, "n": 2}, 400, "best_of"),
    ("chat/completions", {"top_logprobs": 3}, 400, "top_logprobs"),
    ("responses", {"input": 5}, 400, "input"),
    ("responses", {"input": "hi", "text": {"format": {"type": "json_object"}}, "regex": "a"}, 400, "regex"),
    ("responses", {"input": "hi", "text": {"format": {"type": "json_object"}}, "choice": ["a"]}, 400, "choice"),
    ("responses", {"input": "hi", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields(stream: bool, open_tiny: Callable[..., LLM]) -> None:
    async def check() -> None:
        async with asgi(open_tiny(), max_choices=100) as http:
            for path, fields, status, param in CASES:
                body = {**BASES[path], **fields, "stream": stream}
                # Not json=: httpx refuses to write a lone surrogate.
                answer = await http.post(f"/v1/{path}", content=json.dumps(body), headers=JSON)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (status, param) or param is None, (fields, error)
                assert answer.status_code == status, (fields, error)
                assert set(error) == {"message", "type", "param", "code"}
                assert "\n" not in error["message"]
                assert answer.headers["x-request-id"]
            assert (await http.get("/health")).json()["in_flight"] == 0

    asyncio.run(check())


def test_a_call_that_cannot_be_counted_is_answered(
    open_tiny: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OverflowError

    async def check() -> None:
        monkeypatch.setattr(Metrics, "finished", fail)
        async with asgi(open_tiny()) as http:
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200, answer.text

    asyncio.run(asyncio.wait_for(check(), PATIENCE_S))


def test_unknown_fields_and_null_are_nothing(open_tiny: Callable[..., LLM]) -> None:
    async def check() -> None:
        async with asgi(open_tiny()) as http:
            odd = {"temperature": None, "tools": None, "stop": None, "store": True, "user": "me", "colour": {"a": [1]}}
            answer = await http.post("/v1/chat/completions", json={**CHAT, **odd})
            assert answer.status_code == 200, answer.text

    asyncio.run(check())


def test_bodies_that_are_none(open_tiny: Callable[..., LLM]) -> None:
    async def check() -> None:
        async with asgi(open_tiny(), max_body_bytes=10_000) as http:
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
                for body in (b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 5000, b"1" * 6000, b"{}"):
                    answer = await http.post(path, content=body, headers=JSON)
                    assert answer.status_code == 400, (path, body[:20], answer.text)
                    assert answer.json()["error"]["type"] == "invalid_request_error"
                long = await http.post(path, content=b"x" * 10_001)
                assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")

                async def pieces() -> AsyncIterator[bytes]:
                    for _ in range(11):
                        yield b"x" * 1000

                assert (await http.post(path, content=pieces())).status_code == 413, "without a content-length"
            for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/nowhere", 404)):
                answer = await http.request(method, path)
                assert (answer.status_code, "error" in answer.json()) == (status, True)

    asyncio.run(check())


def test_api_key(open_tiny: Callable[..., LLM]) -> None:
    async def check() -> None:
        async with asgi(open_tiny(), api_key="secret") as http:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                answer = await http.get("/v1/models", headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await http.post("/reset_prefix_cache")).status_code == 401
            assert (await http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
            for path in ("/health", "/health/ready", "/health/live", "/metrics"):
                assert (await http.get(path)).status_code == 200, path
                assert (await http.options(path)).status_code == 405, path

    asyncio.run(check())


ALMOST_OPEN = [
    "/healthX",
    "/health/",
    "/health/liveX",
    "/health/../v1/models",
    "/health%2f..",
    "/metricsX",
    "/metrics/",
    "//health",
    "/Health",
    "/v1/models?/health",
    "/openapi.json",
    "/docs",
]


@pytest.mark.parametrize("path", ALMOST_OPEN)
def test_only_exact_paths_are_open(path: str, open_tiny: Callable[..., LLM]) -> None:
    async def check() -> None:
        async with asgi(open_tiny(), api_key="secret") as http:
            for verb in ("GET", "HEAD", "OPTIONS", "POST"):
                assert (await http.request(verb, path)).status_code == 401, verb

    asyncio.run(check())


def test_a_key_of_any_characters(open_tiny: Callable[..., LLM]) -> None:
    async def check() -> None:
        async with asgi(open_tiny(), api_key="schlüssel") as http:
            for key, status in (("schlüssel", 200), ("schlussel", 401)):
                answer = await http.get("/v1/models", headers={b"authorization": f"Bearer {key}".encode()})
                assert answer.status_code == status, key

    asyncio.run(check())


def test_no_websocket_passes_the_door() -> None:
    """There is no websocket route; one would not require a key either."""

    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("it passed")

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def check() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await CallMiddleware(app, Settings())({"type": "websocket", "path": "/health", "headers": []}, receive, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]

    asyncio.run(check())


@settings(max_examples=25, deadline=None)
@given(
    data=st.binary(max_size=200) | st.just(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
)
def test_raw_bytes(data: bytes, server: Serving) -> None:
    """After any bytes on a socket the server continues to work and loses no page."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
    assert httpx.get(f"{server.url}/health").json()["in_flight"] == 0


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["prompt", "max_tokens", "n", "stop", "seed", "logit_bias", "method", "response_format", "stream", "regex",
         "choice", "temperature", "top_p", "logprobs", "model", "priority", "stream_options",
         "stop_token_ids"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(body=st.dictionaries(st.sampled_from(NAMES), junk, max_size=4))
def test_junk_fields(body: dict[str, Any], server: Serving) -> None:
    """The result is an answer or a refusal, never a server error."""
    data = json.dumps({"prompt": "a", "max_tokens": 1, "timeout": 100, **body})
    answer = httpx.post(f"{server.url}/v1/completions", content=data, headers=JSON)
    assert answer.status_code in (200, 400, 404), answer.text
    assert httpx.get(f"{server.url}/health").json()["in_flight"] == 0
