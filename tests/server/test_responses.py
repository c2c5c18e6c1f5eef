"""/v1/responses by OpenAI's client: tools, what is stored, and the order of events."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server import scripted
from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM
from twostroke.server.errors import ApiError
from twostroke.server.openai.answers.responses import ResponsesAnswer
from twostroke.server.openai.response_items import offered_tools
from twostroke.server.openai.schemas.responses import ResponsesBody
from twostroke.server.openai.stored_responses import StoredResponses

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "remember", "description": "Keep a person.", "parameters": SCHEMA}
NAMED: Any = {"type": "function", "name": "remember"}
COMMON: Any = {"model": "tiny", "extra_body": {"seed": 5}}
ONE_CALL: Any = {"tools": [TOOL], "tool_choice": NAMED, "parallel_tool_calls": False, **COMMON}


def tokens(client: openai.OpenAI, **fields: Any) -> int:
    return client.responses.input_tokens.count(model="tiny", **fields).input_tokens


def test_a_call(client: openai.OpenAI, reference: LLM) -> None:
    made = client.responses.create(input="the fox?", **ONE_CALL)
    (call,) = made.output
    assert call.type == "function_call"
    assert call.name == "remember"
    assert call.status == "completed"
    assert call.id != call.call_id
    assert set(json.loads(call.arguments)) == {"name", "age"}
    assert made.output_text == ""
    assert made.tools[0].name == "remember"  # pyright: ignore[reportAttributeAccessIssue]
    assert made.tool_choice.name == "remember"  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    turn: Any = [
        {"role": "user", "content": "the fox?"},
        *(item.model_dump(exclude_none=True) for item in made.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    parts: Any = [*turn[:-1], {**turn[-1], "output": [{"type": "input_text", "text": "done"}]}]
    assert tokens(client, input=turn, tools=[TOOL]) == tokens(client, input=parts, tools=[TOOL])
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    went_on = client.responses.create(
        previous_response_id=made.id, input=[result], tools=[TOOL], tool_choice="none", max_output_tokens=5, **COMMON
    )
    assert went_on.usage is not None
    assert went_on.usage.input_tokens == tokens(client, input=turn, tools=[TOOL], tool_choice="none")
    assert went_on.previous_response_id == made.id


def test_events_of_a_call(client: openai.OpenAI) -> None:
    whole: Any = client.responses.create(input="the fox?", **ONE_CALL)
    events: Any = list(client.responses.create(input="the fox?", stream=True, **ONE_CALL))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    arguments = "".join(event.delta for event in events[3:-3])
    assert arguments == events[-3].arguments == events[-2].item.arguments == whole.output[0].arguments
    assert events[2].item.arguments == ""
    assert events[2].item.status == "in_progress"
    assert len({event.item_id for event in events[3:-2]}) == 1
    with client.responses.stream(input="the fox?", **ONE_CALL) as stream:
        final: Any = [*stream][-1].response  # pyright: ignore[reportAttributeAccessIssue]
    assert final.output[0].arguments == arguments


def test_events_of_a_text(client: openai.OpenAI) -> None:
    events: Any = list(client.responses.create(input="the fox?", stream=True, max_output_tokens=8, **COMMON))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    last = "incomplete" if events[-1].response.incomplete_details else "completed"
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", last]
    text = "".join(event.delta for event in events[4:-4])
    assert text == events[-4].text == events[-3].part.text == events[-1].response.output_text
    assert events[2].item.content == []
    assert events[3].part.text == ""
    with client.responses.stream(input="the fox?", max_output_tokens=8, **COMMON) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text


def test_events_of_a_text_and_calls(reference: LLM) -> None:
    """Items in the order in which they were written; each is done before the next is added."""
    call = '<tool_call>\n{"name": "remember", "arguments": {"name": "a", "age": 1}}\n</tool_call>\n'
    active_call = scripted.active_call(reference.tokenizer, [{"name": "remember", "parameters": SCHEMA}])
    kept: list[dict[str, Any]] = []
    body = ResponsesBody.model_validate({"input": "x", "tools": [TOOL]})
    stream = ResponsesAnswer(
        "tiny", active_call, body, reference.tokenizer, offers=offered_tools([TOOL], []), keep=kept.append
    )
    events = list(stream.opening())
    for token in scripted.tokens("hi " + call * 2):
        events += stream.events(0, token)
    events += stream.closing()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ends = [
        (event["type"].removeprefix("response.output_item."), event["output_index"], event["item"]["type"])
        for event in events
        if event["type"].startswith("response.output_item.")
    ]
    kinds = ("message", "function_call", "function_call")
    assert ends == [(end, index, kind) for index, kind in enumerate(kinds) for end in ("added", "done")]
    last = events[-1]["response"]
    assert kept == [last]
    assert [item["status"] for item in last["output"]] == ["completed"] * 3
    assert [json.loads(item["arguments"]) for item in last["output"][1:]] == [{"name": "a", "age": 1}] * 2
    assert last["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]


def test_what_is_stored(client: openai.OpenAI) -> None:
    """An answer goes on from the items of another, not from its instructions."""
    first = client.responses.create(input="the fox?", instructions="be quick", max_output_tokens=5, **COMMON)
    turns: Any = [
        {"role": "user", "content": "the fox?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and?"},
    ]
    second = client.responses.create(input="and?", previous_response_id=first.id, max_output_tokens=5, **COMMON)
    assert second.usage is not None
    assert second.usage.input_tokens == tokens(client, input=turns)
    assert second.instructions is None
    third = tokens(client, input="so?", previous_response_id=second.id, instructions="be slow")
    turns += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "so?"}]
    assert third == tokens(client, input=turns, instructions="be slow")
    read = client.responses.retrieve(second.id)
    assert read.output_text == second.output_text
    assert read.usage == second.usage
    listed: Any = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.content if isinstance(item.content, str) else item.content[0].text for item in listed] == [
        "the fox?",
        first.output_text,
        "and?",
    ]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.has_more
    assert newest.data[0].content == "and?"  # pyright: ignore[reportAttributeAccessIssue]
    referred: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "and?"}]
    assert tokens(client, input=referred) == tokens(client, input=turns[1:3])
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="there is no response") as gone:
        client.responses.create(input="x", previous_response_id=first.id, **COMMON)
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")
    assert client.responses.retrieve(second.id).id == second.id, "those that went on from it are kept"


def test_store_false_and_streams(client: openai.OpenAI) -> None:
    unkept = client.responses.create(input="x", store=False, max_output_tokens=2, **COMMON)
    assert unkept.store is False  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    events: Any = list(client.responses.create(input="x", stream=True, max_output_tokens=2, **COMMON))
    assert client.responses.retrieve(events[-1].response.id).output_text == events[-1].response.output_text


def test_the_limits_of_what_is_stored() -> None:
    def response(name: str) -> dict[str, Any]:
        return {"id": name, "output": []}

    few = StoredResponses(2, 1 << 20)
    for name in "abc":
        few.put(response(name), None, [])
    assert few.get("b").response["id"] == "b"
    with pytest.raises(ApiError, match="there is no response 'a'"):
        few.get("a")
    size = len('{"id":"a","output":[]}[{"x":"yyyy"}]')
    small = StoredResponses(100, 2 * size)
    for name in "abc":
        small.put(response(name), None, [{"x": "yyyy"}])
    assert [small.get(name).size for name in "bc"] == [size, size]
    small.put(response("d"), small.get("c"), [{"x": "yyyy"}])
    assert small.get("d").size == 2 * size, "what it went on from counts too"
    with pytest.raises(ApiError):
        small.get("c")
    StoredResponses(0, 100).put(response("a"), None, [])


def test_an_old_response_is_forgotten(open_tiny: Callable[..., LLM]) -> None:
    with serving(open_tiny(), max_stored=1) as running:
        client = running.client
        ids = [client.responses.create(input="x", max_output_tokens=2, **COMMON).id for _ in range(2)]
        assert client.responses.retrieve(ids[1]).id == ids[1]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ids[0])


def test_structured_output_and_logprobs(client: openai.OpenAI, reference: LLM) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(input="the fox?", text=form, **COMMON)
    assert set(json.loads(made.output_text)) == {"name", "age"}
    assert made.text.format.name == "person"  # pyright: ignore
    free = client.responses.create(input="x", text={"format": {"type": "json_object"}}, max_output_tokens=9, **COMMON)
    assert free.output_text.startswith("{")
    asked: Any = {"input": "the fox?", "max_output_tokens": 6, "top_logprobs": 2, "temperature": 0, "model": "tiny"}
    asked["include"] = ["message.output_text.logprobs"]
    part: Any = client.responses.create(**asked).output[0].content[0]  # pyright: ignore
    expected = reference.chat([{"role": "user", "content": "the fox?"}], max_tokens=6, logprobs=2).tokens
    assert [one.logprob for one in part.logprobs] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    assert [len(one.top_logprobs) for one in part.logprobs] == [2] * len(expected)
    events: Any = list(client.responses.create(stream=True, **asked))
    sent = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert sent == [one.token for one in part.logprobs]


def test_custom_tools_and_namespaces(client: openai.OpenAI) -> None:
    """A custom tool takes a text; a function in a namespace is called with the namespace beside it."""
    patch: Any = {"type": "custom", "name": "apply_patch", "description": "x", "format": {"type": "text"}}
    chosen: Any = {"tool_choice": {"type": "custom", "name": "apply_patch"}, "parallel_tool_calls": False}
    asked: Any = {"input": "the fox?", "tools": [patch], "max_output_tokens": 60, **chosen, **COMMON}
    events: Any = list(client.responses.create(stream=True, **asked))
    call = events[-1].response.output[0]
    assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
    done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == call.input
    history: Any = [
        {"role": "user", "content": "the fox?"},
        call.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    assert tokens(client, input=history, tools=[patch]) > tokens(client, input=history[:1], tools=[patch])
    space: Any = {"type": "namespace", "name": "mcp__people__", "description": "x", "tools": [TOOL]}
    inside: Any = client.responses.create(
        input="x", tools=[space], tool_choice="required", parallel_tool_calls=False, **COMMON
    ).output[0]
    assert (inside.name, inside.namespace) == ("remember", "mcp__people__")


def test_tools_of_others_are_left_out(client: openai.OpenAI) -> None:
    """They are told in a warning, and the request goes on."""
    kinds = ("web_search", "web_search_preview", "file_search", "code_interpreter", "mcp", "local_shell", "tool_search")
    tools: Any = [{"type": kind} for kind in kinds]
    items: Any = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "local_shell_call", "call_id": "a", "action": {}},
    ]
    hosted: Any = {"tools": [*tools, TOOL], "tool_choice": {"type": "web_search_preview"}}
    made: Any = client.responses.create(input=items, max_output_tokens=3, **hosted, **COMMON)
    assert made.warnings == [
        *(f"a tool of type {kind} is left out: this server does not have it" for kind in kinds),
        "tool_choice asks for web_search_preview, which this server does not have: auto is used",
        "an item of type web_search_call is left out of the input",
        "an item of type local_shell_call is left out of the input",
    ]
    assert [tool.type for tool in made.tools] == [*kinds, "function"], "the tools are told back as they came"


def test_allowed_tools(client: openai.OpenAI) -> None:
    other: Any = {"type": "function", "name": "forget", "parameters": None, "strict": None}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "forget"}]}
    made: Any = client.responses.create(
        input="x", tools=[TOOL, other], tool_choice=allowed, parallel_tool_calls=False, **COMMON
    )
    assert made.output[0].name == "forget"


def test_truncation(client: openai.OpenAI, server: Serving) -> None:
    """The earliest turns are dropped, as many as do not fit; the instructions stay."""
    turns: Any = [{"role": "user", "content": "the fox? " * 150} for _ in range(6)]
    fields: Any = {"instructions": "be quick", "max_output_tokens": 2, **COMMON}
    most = server.llm.config.max_position
    assert tokens(client, input=turns, instructions="be quick") > most
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input=turns, **fields)
    assert refused.value.code == "context_length_exceeded"
    made = client.responses.create(input=turns, truncation="auto", **fields)
    assert made.usage is not None
    fitting = [n for n in (tokens(client, input=turns[i:], instructions="be quick") for i in range(6)) if n < most]
    assert made.usage.input_tokens == max(fitting)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input="the fox? " * 1500, truncation="auto", **fields)


CODEX: Any = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "abc"},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Success."},
        {"type": "tool_search_call", "call_id": "c3", "status": "completed", "execution": "client", "arguments": {}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Run a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__docs__", "tools": [{"type": "function", "name": "find"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-abc",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "abc"},
    "service_tier": "priority",
}  # fmt: skip


def test_codex_requests(server: Serving) -> None:
    """The shape of a turn with everything that it sends. It sets no limit, so the test does."""
    headers = {"originator": "codex_exec", "session_id": "0199-abc", "accept": "text/event-stream"}
    with server.http() as http:
        streamed = http.post("/v1/responses", json={**CODEX, "max_output_tokens": 8}, headers=headers)
        assert streamed.status_code == 200, streamed.text
        lines = [line for line in streamed.text.splitlines() if line.startswith("event: ")]
        assert lines[0] == "event: response.created"
        assert lines[-1] in ("event: response.completed", "event: response.incomplete")
        first = json.loads(streamed.text.splitlines()[1].removeprefix("data: "))
        assert first["warnings"] == [
            "text.verbosity has no effect here",
            "a tool of type web_search is left out: this server does not have it",
            "an item of type tool_search_call is left out of the input",
            "reasoning.effort has no effect: the chat template does not use it",
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\[0\].role"),
        *(({"input": [item]}, r"input\[0\].role") for item in ({}, {"content": "a message without a role"})),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text alone"),
        ({"input": [{"type": "function_call", "name": "a", "call_id": "b"}]}, r"input\[0\].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "b"}]}, r"input\[0\].output"),
        ({"input": [{"type": "item_reference", "id": "nobody"}]}, "there is no item"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "no message"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name"),
        ({"tools": [{"name": "x"}]}, r"tools\[0\].type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_refusals(change: dict[str, Any], message: str, client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "input": "x", "max_output_tokens": 4} | change
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=message) as caught:
        client.responses.create(**body)
    assert "\n" not in caught.value.message
