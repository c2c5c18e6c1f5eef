"""Every API gives receipts, whole and streamed, also of answers with a thought; what has none is refused at once."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.methods.watching import needs_native
from tests.server.conftest import Serving, serving
from tests.thinking import thinking_model
from twostroke.api.llm import LLM
from twostroke.api.receipt_check import verify
from twostroke.api.receipts import Receipt, digest
from twostroke.errors import InvalidRequest
from twostroke.server.grammar import Grammars

USER: Any = [{"role": "user", "content": "the fox?"}]
SCHEMA: Any = {"type": "object", "properties": {"at": {"type": "integer", "maximum": 99}}, "required": ["at"]}
FUNCTION: Any = {"name": "look", "parameters": SCHEMA}
FORM: Any = {"type": "json_schema", "schema": SCHEMA}
LOTS: Any = list("aeinorst ")
# Each is asked whole and as a stream. The template opens a thought, so each answer begins within one.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 12}),
    "chat, a grammar behind a thought": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 99, "thinking_budget": 6, "choice": ["a fox", "a dog"]},
    ),
    "chat, stops behind a thought": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 99, "thinking_budget": 12, "stop": LOTS},
    ),
    "chat, no thought": ("/v1/chat/completions", {"messages": USER, "max_tokens": 9, "thinking_budget": 0}),
    "chat, several": ("/v1/chat/completions", {"messages": USER, "max_tokens": 9, "n": 2, "thinking_budget": 3}),
    "chat, a call": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 99, "thinking_budget": 3, "tool_choice": "required",
         "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "completions": ("/v1/completions", {"prompt": "the", "max_tokens": 12, "repetition_penalty": 1.3}),
    "responses": ("/v1/responses", {"input": "the fox?", "max_output_tokens": 12}),
    "responses, a form": (
        "/v1/responses",
        {"input": "the fox?", "reasoning": {"max_tokens": 4}, "text": {"format": FORM | {"name": "x"}}},
    ),
    "messages": ("/v1/messages", {"model": "tiny", "messages": USER, "max_tokens": 12}),
    "messages, a form": (
        "/v1/messages",
        {"model": "tiny", "messages": USER, "max_tokens": 99, "thinking": {"type": "disabled"},
         "output_config": {"format": FORM}},
    ),
    "ollama chat": ("/api/chat", {"model": "tiny", "messages": USER, "options": {"num_predict": 12}}),
    "ollama generate": ("/api/generate", {"model": "tiny", "prompt": "the", "options": {"num_predict": 12}}),
    "ollama raw": ("/api/generate", {"model": "tiny", "prompt": "the", "raw": True, "options": {"num_predict": 5}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def running(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = thinking_model(tiny_directory("qwen3"), tmp_path_factory.mktemp("open"), "open")
    with serving(LLM(str(directory), kv_bytes=8 << 20, threads=1)) as one:
        yield one


def post(running: Serving, path: str, status: int = 200, **body: Any) -> list[dict[str, Any]]:
    """The response, or the objects of its stream."""
    with running.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def receipts(events: list[dict[str, Any]]) -> list[Receipt]:
    """Those of the one event that has any."""
    [found] = [
        holder
        for event in events
        if (holder := event.get("response") if isinstance(event.get("response"), dict) else event)
        and ({"receipt", "receipts"} & holder.keys())
    ]
    return [Receipt.from_json(one) for one in found.get("receipts") or [found["receipt"]]]


@needs_native
@pytest.mark.parametrize("name", ASKED)
def test_every_api(running: Serving, name: str) -> None:
    path, body = ASKED[name]
    seeded: dict[str, Any] = {"seed": 7, "receipt": True}
    if path.startswith("/api"):
        seeded = {"receipt": True, "options": {**body["options"], "seed": 7}}
    whole = receipts(post(running, path, **{**body, "stream": False, **seeded}))
    streamed = receipts(post(running, path, **{**body, "stream": True, **seeded}))
    assert len(whole) == body.get("n", 1)
    remake = Grammars(running.llm.tokenizer, running.llm.config.vocab_size).remake
    for one, other in zip(whole, streamed, strict=True):
        assert (one.tokens, one.logprobs, one.options) == (other.tokens, other.logprobs, other.options)
        assert one.name
        found = verify(running.llm, one, remake)
        assert (found.wrong, found.sealed) == (None, True)


@needs_native
def test_the_thought_is_a_part_of_what_is_checked(running: Serving) -> None:
    """Where a grammar begins cannot be forged, and what is no description is told."""
    path, body = ASKED["chat, a grammar behind a thought"]
    [made] = receipts(post(running, path, **body, seed=7, receipt=True))
    assert made.options["thought"] == {"form": "think", "phase": "thought", "budget": 6, "lead": True}
    remake = Grammars(running.llm.tokenizer, running.llm.config.vocab_size).remake

    def checked(**changes: Any) -> str | None:
        options = made.options | {"thought": made.options["thought"] | changes}
        return verify(running.llm, replace(made, options=options, options_digest=digest(options)), remake).wrong

    assert checked() is None
    for changes in ({"budget": 5}, {"phase": "answer"}):
        assert "differs" in (checked(**changes) or "")
    for changes in ({"budget": "6"}, {"form": "other"}, {"phase": "sleep"}, {"lead": None}, {"more": 1}):
        with pytest.raises(InvalidRequest, match="the receipt's options are none of a request"):
            checked(**changes)


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/responses", {"input": "a"}, "a receipt is made for plain generation: leave out method"),
        ("/v1/messages", {"model": "tiny", "messages": USER, "max_tokens": 5}, "a receipt is made for plain"),
        ("/api/chat", {"model": "tiny", "messages": USER}, "a receipt is made for plain"),
    ],
)
def test_another_method_has_none(running: Serving, path: str, body: dict[str, Any], word: str) -> None:
    [refused] = post(running, path, 400, **body, receipt=True, method="repeat")
    assert word in json.dumps(refused)


def test_stops_beside_tools_have_none(running: Serving) -> None:
    """Also where a thought comes before the tools; in one line, before anything is computed."""
    tools = [{"type": "function", "function": FUNCTION}]
    [refused] = post(
        running, "/v1/chat/completions", 400, messages=USER, tools=tools, stop=["x"], receipt=True, thinking_budget=3
    )
    assert refused["error"]["message"] == "a receipt has no stop strings beside tools: leave out stop"


def test_a_stored_response_keeps_its_receipt(running: Serving) -> None:
    [made] = post(running, "/v1/responses", input="a", max_output_tokens=3, receipt=True)
    with running.http() as http:
        assert http.get(f"/v1/responses/{made['id']}").json()["receipt"] == made["receipt"]
