"""What real models do with tools, greedy, through the server: calls are made, and answers without calls stay text."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM

pytestmark = pytest.mark.models


def function(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
WEATHER = function("get_weather", "Get the current weather in a city", ["city"], city=TEXT)
ADD = function("add", "Add two numbers", ["a", "b"], a=NUMBER, b=NUMBER)
SEARCH = function("search", "Search the web for a query", ["query"], query=TEXT)
WRITE = function("write_file", "Write a file", ["path", "content"], path=TEXT, content=TEXT)
NOW = function("now", "Current time", [])
CALLS: list[tuple[str, list[Any], str]] = [
    ("What is the weather in Paris?", [WEATHER], "get_weather"),
    ("What is 13 plus 29? Use the tool.", [ADD], "add"),
    ("Search the web for llama.cpp", [SEARCH, WEATHER], "search"),
    ("Write hello to /tmp/a.txt", [WRITE], "write_file"),
    ("What time is it?", [NOW], "now"),
    ("Is it warm in Tokyo right now?", [WEATHER, ADD, SEARCH], "get_weather"),
]


@pytest.fixture(scope="module", params=["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def qwen(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with serving(LLM(request.param, kv_bytes=400 << 20), model_name="qwen") as running:
        yield running


def answer(qwen: Serving, prompt: str, tools: list[Any], **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    options: Any = {"model": "qwen", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 160}
    return qwen.client.chat.completions.create(**options | fields).choices[0]


@pytest.mark.parametrize(("prompt", "tools", "name"), CALLS)
def test_auto_makes_a_call(qwen: Serving, prompt: str, tools: list[Any], name: str) -> None:
    made = answer(qwen, prompt, tools)
    assert made.finish_reason == "tool_calls"
    assert made.message.content is None
    called = made.message.tool_calls[0].function
    assert called.name == name
    schema = next(tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name)
    assert set(schema["required"]) <= set(json.loads(called.arguments)) <= set(schema["properties"])


def test_json_that_is_no_call_is_left_alone(qwen: Serving) -> None:
    for prompt in (
        "Show me an example of a JSON object describing a person, in a code block.",
        "Explain how I would call get_weather, show an example of the JSON, but do not call it.",
    ):
        made = answer(qwen, prompt, [WEATHER])
        assert made.finish_reason == "stop"
        assert made.message.tool_calls is None
        assert made.message.content


def test_stop_strings_and_named_choices(qwen: Serving) -> None:
    prompt = "What is the weather in Paris and in London?"
    made = answer(qwen, prompt, [WEATHER], stop=["Par", "}"])
    assert made.finish_reason == "tool_calls"
    assert json.loads(made.message.tool_calls[0].function.arguments)["city"] == "Paris"
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert len(answer(qwen, prompt, [WEATHER, ADD], tool_choice=named).message.tool_calls) == 1
    assert len(answer(qwen, prompt, [WEATHER, ADD], tool_choice="required").message.tool_calls) >= 1
    assert answer(qwen, prompt, [WEATHER], tool_choice="none", max_tokens=20).message.tool_calls is None
