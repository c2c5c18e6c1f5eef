"""Conversations with tools reach every kind of chat template: those that know tools, and those that refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_tokenizer
from twostroke.engine.output import ChoiceOutput
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.chat_templates import ChatTemplates
from twostroke.models.checkpoints.checkpoint import HfTokenizerSource
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.answer_reader import CallArguments, CallStart
from twostroke.sampling.draw import Sampled
from twostroke.sampling.params import SamplingParams
from twostroke.server.tools import describe_tools, prompt_messages
from twostroke.server.tools.parser import parser_factory

FUNCTIONS: list[dict[str, Any]] = [{"name": "weather", "parameters": {"type": "object", "properties": {}}}]
USER = {"role": "user", "content": "Is it raining?"}


def called(*cities: str) -> dict[str, Any]:
    calls = [
        {"id": f"call_{city}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for city in cities
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(city: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{city}", "content": f"wet in {city}"}


PARALLEL = [USER, called("Rome", "Oslo"), result("Rome"), result("Oslo")]


class Templates:
    """A tokenizer as far as a prompt needs one."""

    def __init__(self, source: str, **named: str) -> None:
        self._chat = ChatTemplates({"default": source, **named}, {})

    def template_for(self, tools: bool) -> str | None:
        return self._chat.source(tools)

    def chat(self, messages: Any, **variables: Any) -> str:
        return self._chat.render(messages, **variables)

    def prompt(self, messages: list[dict[str, Any]], functions: list[dict[str, Any]]) -> str:
        form, tools = prompt_messages(self, messages, functions, {})
        return self.chat(form, tools=tools)


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<a>{{ m.content }}{% endif %}{% endfor %}"
)
ONE_CALL = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
)
NINE = (
    "{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ c.id }}{{ c.function.name }}{% endfor %}<{{ m.role }}>{{ m.tool_call_id }}{{ m.content }}{% endfor %}"
)
NONE = (
    "{{ tools | tojson }}{% for m in messages %}{% if m['content'] is none %}{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}{% else %}"
    "<{{ m.role }}>{{ m['content'] }}{% endif %}{% endfor %}"
)


def test_a_template_that_knows_tools_gets_the_messages_as_they_are() -> None:
    tokenizer = Templates(KNOWS)
    form, tools = prompt_messages(tokenizer, PARALLEL, FUNCTIONS, {})
    assert list(form) == PARALLEL
    assert tools == [{"type": "function", "function": FUNCTIONS[0]}]


def test_without_tools_nothing_changes() -> None:
    messages = [{"role": "system", "content": "x"}, USER]
    assert prompt_messages(Templates(NO_SYSTEM), messages, [], {}) == (messages, None)


def test_the_template_for_tools_is_used() -> None:
    assert Templates(PLAIN, tool_use=KNOWS).prompt([USER], FUNCTIONS).startswith("[weather]<user>")


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM, DROPS_SYSTEM, KNOWS, ONE_CALL, NINE, NONE])
@pytest.mark.parametrize("system", [False, True])
def test_nothing_is_lost(template: str, system: bool) -> None:
    messages = [*([{"role": "system", "content": "Be brief."}] if system else []), *PARALLEL]
    text = Templates(template).prompt(messages, FUNCTIONS)
    assert all(part in text for part in ("raining", "weather", "wet in Rome", "wet in Oslo"))
    assert ("Be brief." in text) is system


def test_a_system_message_goes_to_the_first_user_where_there_is_no_such_role() -> None:
    for template, mark in ((NO_SYSTEM, "<user>"), (DROPS_SYSTEM, "<u>")):
        text = Templates(template).prompt([USER], FUNCTIONS)
        assert text.startswith(f"{mark}You may call functions")
        assert text.endswith("\n\nIs it raining?")


def test_parallel_results_where_roles_alternate() -> None:
    text = Templates(NO_SYSTEM).prompt(PARALLEL, FUNCTIONS)
    assert text.count("<user>") == 2
    assert text.index("wet in Rome") < text.index("wet in Oslo")


def test_one_call_at_a_time() -> None:
    text = Templates(ONE_CALL).prompt(PARALLEL, FUNCTIONS)
    places = [text.index(part) for part in ('"city": "Rome"', "wet in Rome", '"city": "Oslo"', "wet in Oslo")]
    assert places == sorted(places)


def test_a_result_has_the_id_of_its_call() -> None:
    text = Templates(NINE).prompt(PARALLEL, FUNCTIONS)
    id = text.partition("</assistant>")[0].rpartition("weather")[0][-9:]
    assert len(id) == 9
    assert f"<tool>{id}wet in Oslo" in text


def test_content_is_none_and_arguments_are_text_for_templates_that_ask() -> None:
    assert 'weather{"city": "Rome"}weather{"city": "Oslo"}' in Templates(NONE).prompt(PARALLEL, FUNCTIONS)


def test_a_refusal_keeps_the_templates_words() -> None:
    with pytest.raises(InvalidRequest, match="never"):
        Templates("{{ raise_exception('never') }}").prompt([USER], FUNCTIONS)


@pytest.mark.parametrize(
    "part",
    [{"required": 2.5}, {"required": [[], {}]}, {"properties": -1}, {"properties": ["a"]}]
    + [{"properties": {"a": {"enum": odd}}} for odd in (5, {"b": 1})],
    ids=str,
)
def test_a_schema_that_is_none_has_a_prompt(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]} | part
    assert "weather" in Templates(PLAIN).prompt([USER], [{"name": "weather", "parameters": schema}])


def test_tools_as_text() -> None:
    system, user, said, back = describe_tools([USER, called("Rome"), result("Rome")], [{"function": {"name": "now"}}])
    assert system["role"] == "system"
    assert '"name": "now"' in system["content"]
    assert user == USER
    assert said["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert back == {"role": "user", "content": "<tool_response>\nwet in Rome\n</tool_response>"}


def test_a_models_special_tokens_are_seen_where_calls_are_written_with_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    for id, text in enumerate(("[TOOL_CALLS]", "[ARGS]", "[OTHER]"), max(data["model"]["vocab"].values()) + 1):
        data["added_tokens"].append({**data["added_tokens"][0], "id": id, "content": text})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.from_source(HfTokenizerSource(tmp_path))
    reading = parser_factory(tokenizer, FUNCTIONS)
    assert {tokenizer.token_text(id) for id in reading.shown} == {"[TOOL_CALLS]", "[ARGS]"}
    track = ChoiceOutput(SamplingParams(stop=("city",), reader=reading), tokenizer, choice=0)
    ids = tokenizer.encode('[OTHER][TOOL_CALLS]weather[ARGS]{"city": 1}', add_bos=False)
    text = "".join(track.push(Sampled(id)).text for id in [*ids, min(tokenizer.eos_ids)])
    assert text == '[TOOL_CALLS]weather[ARGS]{"city": 1}'
    start, arguments = [piece for span in reading().spans(text) for piece in span.pieces]
    assert isinstance(start, CallStart)
    assert arguments == CallArguments(0, '{"city": 1}')
