"""Tools are in the prompt as the client sent them, and so as `apply_chat_template` of transformers writes them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM

# As Qwen's and others' templates write tools and calls.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}</s>'
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "weather", "parameters": CITY},
    {"name": "weather", "description": "Überall <ok> & 'so'", "parameters": CITY},
    {"parameters": CITY, "description": "another order", "name": "weather"},
    {"name": "weather", "parameters": CITY, "strict": False},
    {"name": "weather", "parameters": CITY, "strict": True},
    {"name": "weather"},
    {"name": "weather", "parameters": {}},
    {"name": "weather", "parameters": CITY, "returns": {"type": "string"}},
]


@pytest.fixture(scope="module")
def directory(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tools")
    for file in tiny_directory("llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    return copy


@pytest.fixture(scope="module")
def running(directory: Path) -> Iterator[Serving]:
    with serving(LLM(str(directory), kv_bytes=16 << 20, threads=1)) as one:
        yield one


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_prompt_is_that_of_transformers(function: dict[str, Any], running: Serving, directory: Path) -> None:
    """Token by token, for each API that takes OpenAI's tools."""
    messages = [{"role": "system", "content": "be quick"}, {"role": "user", "content": "the fox?"}]
    tools = [{"type": "function", "function": function}]
    theirs: Any = AutoTokenizer.from_pretrained(str(directory))
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    with running.http() as http:
        asked = {"messages": messages, "tools": tools}
        assert http.post("/tokenize", json=asked).json()["tokens"] == expected
        chat = http.post("/v1/chat/completions", json=asked | {"max_tokens": 1}).json()
        local = http.post(
            "/api/chat", json=asked | {"model": "tiny", "stream": False, "options": {"num_predict": 1}}
        ).json()
        assert chat["usage"]["prompt_tokens"] == local["prompt_eval_count"] == len(expected)


def test_the_other_apis_add_nothing(running: Serving) -> None:
    """Their tools have other forms; in the prompt they are as OpenAI's client would send them."""
    function: dict[str, Any] = {"name": "weather", "description": "of a city", "parameters": CITY}
    messages = [{"role": "user", "content": "the fox?"}]
    theirs = {"name": "weather", "description": "of a city", "input_schema": CITY}
    with running.http() as http:
        asked = {"messages": messages, "tools": [{"type": "function", "function": function}]}
        expected = http.post("/tokenize", json=asked).json()["count"]
        counted = http.post(
            "/v1/messages/count_tokens", json={"model": "tiny", "messages": messages, "tools": [theirs]}
        )
        assert counted.json()["input_tokens"] == expected
        body = {"model": "tiny", "input": messages, "tools": [{"type": "function", **function}]}
        assert http.post("/v1/responses/input_tokens", json=body).json()["input_tokens"] == expected
        assert http.post("/tokenize", json={"messages": messages}).json()["count"] < expected
