"""Anthropic's client: answers over HTTP equal those of `LLM.chat`."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server import scripted
from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM
from twostroke.server.anthropic.answer import MessageAnswer

SYSTEM, QUESTION = "be quick", "the fox?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PLAIN: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
SAMPLED: Any = {"model": "tiny", "max_tokens": 20, "extra_body": {"seed": 5}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "remember", "description": "Keep a person.", "input_schema": SCHEMA}]
ONE: Any = {"type": "tool", "name": "remember", "disable_parallel_tool_use": True}
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


@pytest.fixture(scope="module")
def claude(server: Serving) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def prompt_of(http: httpx.Client, body: dict[str, Any]) -> int:
    """Tokens of a body's prompt, by the endpoint that counts them."""
    answer = http.post("/v1/messages/count_tokens", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def test_a_message(claude: anthropic.Anthropic, reference: LLM) -> None:
    expected = reference.chat(PLAIN, max_tokens=20, temperature=1.0, seed=5)
    made = claude.messages.create(system=SYSTEM, messages=MESSAGES, **SAMPLED)
    assert [block.type for block in made.content] == ["text"]
    assert made.content[0].text == expected.text  # pyright: ignore[reportAttributeAccessIssue]
    assert made.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[str(expected.finish_reason)]
    assert made.stop_sequence is None
    assert (made.role, made.type, made.model) == ("assistant", "message", "tiny")
    assert made.usage.output_tokens == len(expected.tokens)
    assert made._request_id
    again = claude.messages.create(
        system=[{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        **SAMPLED,
    )
    assert again.content == made.content
    prompt = len(reference.tokenizer.encode_chat(PLAIN))
    assert again.usage.cache_read_input_tokens == (prompt - 1) // 16 * 16
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == prompt
    assert again.usage.cache_creation_input_tokens == 0


def test_streams(claude: anthropic.Anthropic, reference: LLM) -> None:
    """By both of the client's ways, the joined pieces are the whole, and the events are Anthropic's in their order."""
    expected = reference.chat(PLAIN, max_tokens=20, temperature=1.0, seed=5)
    with claude.messages.stream(system=SYSTEM, messages=MESSAGES, **SAMPLED) as stream:
        assert "".join(stream.text_stream) == expected.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == len(expected.tokens)
    assert final.stop_reason in ("max_tokens", "end_turn")
    events = list(claude.messages.create(system=SYSTEM, messages=MESSAGES, stream=True, **SAMPLED))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start: Any = events[0]
    prompt = len(reference.tokenizer.encode_chat(PLAIN))
    assert start.message.usage.input_tokens + start.message.usage.cache_read_input_tokens == prompt
    with claude.messages.with_streaming_response.create(
        system=SYSTEM, messages=MESSAGES, stream=True, **SAMPLED
    ) as raw:
        lines = [line for line in raw.iter_lines() if line.startswith("event: ")]
    assert lines[:2] == ["event: message_start", "event: ping"]


def test_the_answer_goes_on_from_an_assistants_turn(claude: anthropic.Anthropic, reference: LLM) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "the quick"}]
    made = claude.messages.create(messages=begun, **SAMPLED)
    prompt = reference.tokenizer.encode_chat(begun, continue_final_message=True)
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == len(prompt)
    expected = reference.generate([prompt], max_tokens=20, temperature=1.0, seed=5)[0]
    assert made.content[0].text == expected.text  # pyright: ignore[reportAttributeAccessIssue]


def test_stop_sequences(claude: anthropic.Anthropic, reference: LLM) -> None:
    whole = reference.chat(PLAIN, max_tokens=20, temperature=1.0, seed=5).text
    stop = whole[len(whole) // 2 :][:2]
    made = claude.messages.create(system=SYSTEM, messages=MESSAGES, stop_sequences=[stop], **SAMPLED)
    assert made.content[0].text == whole[: whole.index(stop)]  # pyright: ignore[reportAttributeAccessIssue]
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
    with claude.messages.stream(system=SYSTEM, messages=MESSAGES, stop_sequences=[stop], **SAMPLED) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_tools(claude: anthropic.Anthropic) -> None:
    """A call as a block, its input as JSON in pieces, and the next turn with the result."""
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "extra_body": {"seed": 4}}
    made = claude.messages.create(tool_choice=ONE, **fields)
    assert made.stop_reason == "tool_use"
    (call,) = made.content
    assert call.type == "tool_use"
    assert call.id.startswith("toolu_")
    assert call.name == "remember"
    assert set(call.input) == {"name", "age"}
    with claude.messages.stream(tool_choice=ONE, **fields) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == call.input
    assert final.content[0].input == call.input  # pyright: ignore[reportAttributeAccessIssue]
    assert final.stop_reason == "tool_use"
    forced = claude.messages.create(tool_choice={"type": "any"}, **fields)
    assert forced.content[0].type == "tool_use"
    none = claude.messages.create(tool_choice={"type": "none"}, **fields | {"max_tokens": 5})
    assert [block.type for block in none.content] == ["text"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
    turns: Any = [*MESSAGES, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    after = claude.messages.create(**fields | {"messages": turns, "max_tokens": 5})
    before = claude.messages.count_tokens(model="tiny", messages=MESSAGES, tools=TOOLS)
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > before.input_tokens + 10


def test_a_text_and_calls(reference: LLM) -> None:
    """Blocks in the order in which they were written; each is closed before the next begins."""
    call = '<tool_call>\n{"name": "remember", "arguments": {"name": "a", "age": 1}}\n</tool_call>\n'
    active_call = scripted.active_call(reference.tokenizer, [{"name": "remember", "parameters": SCHEMA}])
    stream, tokens = MessageAnswer("tiny", active_call), scripted.tokens("hi " + call * 2)
    events = [event for token in tokens for event in stream.events(0, token)] + list(stream.closing())
    marks = [(event["type"], event.get("index")) for event in events if event["type"] != "content_block_delta"]
    assert marks == [
        *((f"content_block_{end}", index) for index in range(3) for end in ("start", "stop")),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = MessageAnswer("tiny", active_call)
    for token in tokens:
        whole.add_token(0, token)
    content = whole.body()["content"]
    assert [block["type"] for block in content] == ["text", "tool_use", "tool_use"]
    assert content[0]["text"].strip() == "hi"
    for index, block in enumerate(content[1:], 1):
        assert block["input"] == {"name": "a", "age": 1}
        parts = [event["delta"]["partial_json"] for event in events if event.get("index") == index and "delta" in event]
        assert json.loads("".join(parts)) == block["input"]
    assert content[1]["id"] != content[2]["id"]


def test_a_call_that_is_cut_off(claude: anthropic.Anthropic) -> None:
    """It has no input to give, so a whole message leaves it out."""
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": ONE, "extra_body": {"seed": 4}}
    whole = claude.messages.create(max_tokens=200, **fields)
    cut = claude.messages.create(max_tokens=whole.usage.output_tokens - 20, **fields)
    assert (cut.content, cut.stop_reason) == ([], "max_tokens")


def test_structured_output(claude: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"}
    made = claude.messages.create(model="tiny", messages=MESSAGES, max_tokens=200, output_config=form)
    assert set(json.loads(made.content[0].text)) == {"name", "age"}  # pyright: ignore[reportAttributeAccessIssue]


def test_the_prompt_of_every_kind_of_block(server: Serving, reference: LLM) -> None:
    """What a body says is what the template gets."""
    thought = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]
    same: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"messages": MESSAGES, "system": SYSTEM}, PLAIN),
        ({"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}}, PLAIN[1:]),
        ({"messages": MESSAGES, "thinking": {"type": "adaptive"}}, PLAIN[1:]),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": [*thought, {"type": "text", "text": "ja"}]},
                          {"role": "user", "content": "and?"}]},
            [*PLAIN[1:], {"role": "assistant", "content": "ja"}, {"role": "user", "content": "and?"}],
        ),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": "and?"}]},
            [{"role": "user", "content": f"{QUESTION}\n\nand?"}],
        ),
        (
            {"messages": [*MESSAGES, {"role": "system", "content": "5 tokens left"}], "system": SYSTEM},
            [PLAIN[0], {"role": "user", "content": f"{QUESTION}\n\n5 tokens left"}],
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
                {"type": "search_result", "title": "S", "source": "x", "content": [{"type": "text", "text": "R"}]},
            ]}]},
            [{"role": "user", "content": "T\n\nD\n\nS\n\nR"}],
        ),
    ]  # fmt: skip
    with server.http() as http:
        for body, messages in same:
            assert prompt_of(http, body) == len(reference.tokenizer.encode_chat(messages)), body


@pytest.mark.parametrize(
    "system",
    [
        lambda number: [{"type": "text", "text": HEADER.format(number)}, {"type": "text", "text": SYSTEM * 40}],
        lambda number: HEADER.format(number) + "\n" + SYSTEM * 40,
        lambda number: [{"type": "text", "text": HEADER.format(number) + "\n\n" + SYSTEM * 40}],
    ],
    ids=["block", "text", "within"],
)
def test_a_header_that_changes_spoils_no_prefix_hit(
    system: Callable[[int], Any], claude: anthropic.Anthropic, reference: LLM
) -> None:
    prompt = len(reference.tokenizer.encode_chat([{"role": "system", "content": SYSTEM * 40}, *MESSAGES]))
    for number in (1, 2):
        usage = claude.messages.create(system=system(number), messages=MESSAGES, **SAMPLED).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == prompt
    assert usage.cache_read_input_tokens == (prompt - 1) // 16 * 16


CLAUDE_CODE: Any = {
    "model": "claude-sonnet-4-5-20250929",
    "max_tokens": 20,
    "stream": True,
    "system": [
        {"type": "text", "text": HEADER.format("fa690")},
        {"type": "text", "text": "You are a CLI.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Follow the rules.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "list the files", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "# Environment\nlinux"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "abc"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "toolu_02", "name": "mcp__files__" + "x" * 60, "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": "a.txt", "is_error": False},
                {"type": "tool_result", "tool_use_id": "toolu_02", "content": [{"type": "text", "text": "b"}]},
                {"type": "tool_result", "tool_use_id": "toolu_02", "is_error": True},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "<total_tokens>5000 tokens left</total_tokens>"},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Run a command.",
            "input_schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {"name": "mcp__files__" + "x" * 60, "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "tool_choice": {"type": "auto"},
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}


def test_claude_codes_requests(server: Serving) -> None:
    """The shape of a turn with everything that it sends, as public threads show it."""
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-app": "cli",
        "authorization": "Bearer none",
    }
    with server.http() as http:
        streamed = http.post("/v1/messages?beta=true", json=CLAUDE_CODE, headers=headers)
        assert streamed.status_code == 200, streamed.text
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert "event: message_stop" in streamed.text
        whole = http.post("/v1/messages?beta=true", json={**CLAUDE_CODE, "stream": False}, headers=headers).json()
        assert whole["warnings"] == [
            "the tool web_search is left out: web_search_20250305 is not one that this server has",
            "output_config.effort has no effect: the chat template does not use it",
            "thinking has no effect: this model's answers have no thoughts that are set apart",
        ]
        assert whole["model"] == CLAUDE_CODE["model"]
        counted = {key: CLAUDE_CODE[key] for key in ("model", "messages", "system", "tools")}
        tokens = http.post("/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"]
        assert tokens == whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
        quota = {
            "model": "claude-haiku-4-5-20251001",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "quota"}],
        }
        assert http.post("/v1/messages?beta=true", json=quota).status_code == 200


def test_models(claude: anthropic.Anthropic) -> None:
    listed = list(claude.models.list())
    assert [model.id for model in listed] == ["tiny"]
    assert claude.models.retrieve("tiny") == listed[0]
    assert listed[0].created_at.year >= 2026


RESULT = {"type": "tool_result", "tool_use_id": "a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages.0.content.0.text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"name": "f", "description": "a tool without a schema"}]}, r"tools.0.input_schema"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "must be text",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "input"),
        *(
            (
                {"messages": [{"role": "user", "content": [{**RESULT, "content": content}]}]},
                "must be a text or a list of blocks",
            )
            for content in (5, [{"type": 5}], [{"type": {"a": 1}}])
        ),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], message: str, claude: anthropic.Anthropic) -> None:
    """In Anthropic's shape, one line each."""
    body: Any = {"model": "tiny", "max_tokens": 5, "messages": MESSAGES} | change
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        claude.messages.create(**body)
    answer: Any = caught.value.body
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert "\n" not in answer["error"]["message"]
    assert answer["request_id"]


def test_other_errors(claude: anthropic.Anthropic, open_tiny: Callable[..., LLM]) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no model") as missing:
        claude.messages.create(model="gpt-5", max_tokens=5, messages=MESSAGES)
    assert missing.value.body["error"]["type"] == "not_found_error"  # pyright: ignore
    with serving(open_tiny(), api_key="secret", max_body_bytes=4000) as running:

        def client(**keys: Any) -> anthropic.Anthropic:
            return anthropic.Anthropic(base_url=running.url, max_retries=0, timeout=PATIENCE_S, **keys)

        fields: Any = {"model": "tiny", "max_tokens": 3, "messages": MESSAGES}
        for keys in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            assert client(**keys).messages.create(**fields).usage.output_tokens
        with pytest.raises(anthropic.AuthenticationError) as denied:
            client(api_key="wrong").messages.create(**fields)
        assert denied.value.body["error"]["type"] == "authentication_error"  # pyright: ignore
        with pytest.raises(anthropic.APIStatusError) as long:
            client(api_key="secret").messages.create(**fields | {"system": "x" * 5000})
        assert long.value.status_code == 413
        assert long.value.body["error"]["type"] == "request_too_large"  # pyright: ignore


def test_whole_numbers_may_be_written_as_floats(server: Serving) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3.0, "top_k": 1.0, "seed": 5.0, "priority": 0.0}
    with server.http() as http:
        assert http.post("/v1/messages", json=body).json()["usage"]["output_tokens"] <= 3
        assert http.post("/v1/messages", json=body | {"max_tokens": 2.5}).status_code == 400
