"""Calls of tools, as the families of models write them, are read from text in any pieces."""

# ruff: noqa: RUF001 - DeepSeek's marks have fullwidth bars

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.sampling.answer_reader import CallArguments, CallStart, Piece, PlainText
from twostroke.server.tools.dialects import DIALECTS, formats_of
from twostroke.server.tools.parser import ToolParser, ToolParserFactory, new_id

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "ok": {"type": "boolean"}},
}
OFFERED: dict[str, Any] = {name: {"name": name, "parameters": PARAMETERS} for name in ("weather", "now", "add.all")}
Read = tuple[str, list[tuple[str, str]]]  # the text, and the calls' names and arguments
PARIS = ("weather", '{"city": "Paris"}')
OBJECT = '{"name": "weather", "arguments": {"city": "Paris"}}'
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>"


def pieces(parser: ToolParser, text: str, ended: bool = False, cut: bool = False) -> list[Piece]:
    return [piece for span in parser.spans(text, ended, cut) for piece in span.pieces]


def read(text: str, cuts: Sequence[int] = (), sign: str = "", max_calls: int | None = None, cut: bool = False) -> Read:
    """What a model with this sign in its template has written."""
    parser = ToolParser(OFFERED, formats_of(sign, ()), max_calls)
    spans = [span for start, stop in pairwise([0, *cuts, len(text)]) for span in parser.spans(text[start:stop])]
    spans += parser.spans("", ended=True, cut=cut)
    assert "".join(span.written for span in spans) == text, "the spans are the whole text"
    told, calls = "", list[tuple[str, str]]()
    for piece in (piece for span in spans for piece in span.pieces):
        match piece:
            case PlainText(more):
                told += more
            case CallStart(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, more):
                calls[index] = (calls[index][0], calls[index][1] + more)
            case _:
                raise AssertionError(f"a parser of tools finds no {piece}")
    assert parser.calls >= len(calls)
    return told, calls


# What a template or a vocabulary contains, what the model writes, the text, and the calls.
WRITTEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("", f"Let me <look>.\n{HERMES}\n{HERMES} Done <tool", "Let me <look>.\n Done <tool", [PARIS, PARIS]),
    (
        "",
        '<tool_call>\n{"name": "now", "arguments": {"a": "}\\"{", "b": [{"x": 1}]}}\n</tool_call>',
        "",
        [("now", '{"a": "}\\"{", "b": [{"x": 1}]}')],
    ),
    ("", '<tool_call>{{"name": "now", "arguments": {}}}</tool_call>', "", [("now", "{}")]),
    ("", '<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", "{}")]),
    ("", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "weather"}\n</tool_call>', "", [PARIS]),
    ("", '<tool_call>\n[{"name": "now", "arguments": null}]\n</tool_call>', "", [("now", "{}")]),
    ("", f"<tools>\n{OBJECT}\n</tools>", "", [PARIS]),
    (
        "",
        '```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}\n```',
        "",
        [("weather", '{\n    "city": "Paris"\n  }')],
    ),
    ("", f"```\n[{OBJECT}, {OBJECT}]\n```\n", "", [PARIS, PARIS]),
    ("", f"```json\n{OBJECT}\n```\n```json\n{OBJECT}\n```", "", [PARIS, PARIS]),
    ("", f"```xml\n{HERMES}\n```", "", [PARIS]),
    ("", f"\n{OBJECT}", "", [PARIS]),
    ("", f"{OBJECT}\n{OBJECT}", "", [PARIS, PARIS]),
    ("", f"{OBJECT}; {OBJECT}", "", [PARIS, PARIS]),
    ("", f'[{OBJECT}, {{"name": "now", "arguments": {{}}}}]', "", [PARIS, ("now", "{}")]),
    ("", f'{OBJECT}\n{{"celsius": 21}}', '{"celsius": 21}', [PARIS]),
    ("", '{{"name": "weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    (
        "",
        '{"type": "function", "id": "a", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}',
        "",
        [PARIS],
    ),
    ("", '{"name": "weather", "parameters": {"city": "Paris"}, "id": "1"}', "", [PARIS]),
    ("", '{"name": "functions.weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    (
        "",
        '[weather(city="Paris", days=3, ok=true), now()]',
        "",
        [("weather", '{"city": "Paris", "days": 3, "ok": true}'), ("now", "{}")],
    ),
    ("", "[weather('Paris', ok=None)]", "", [("weather", '{"city": "Paris", "ok": null}')]),
    ("", f"<think>As {OBJECT}?</think>\n\n{OBJECT}", f"<think>As {OBJECT}?</think>", [PARIS]),
    ("<|python_tag|>", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("<|python_tag|>", '<function=weather>{"city": "Paris"}</function>', "", [PARIS]),
    ("<|python_start|>", '<|python_start|>[weather(city="Paris")]<|python_end|>', "", [PARIS]),
    ("[TOOL_CALLS]", f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]", "", [PARIS, PARIS]),
    (
        "[TOOL_CALLS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]a1b2[ARGS]{}',
        "",
        [PARIS, ("now", "{}")],
    ),
    (
        "<｜tool▁calls▁begin｜>",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [PARIS, ("now", "{}")],
    ),
    (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [PARIS],
    ),
    (
        "｜DSML｜",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [PARIS],
    ),
    (
        "<function=",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n",
        "I look.\n",
        [("weather", '{"city": "Paris", "days": 3}')],
    ),
    (
        "<function=",
        "<function=weather>\n<parameter=city>\n[1]\n</parameter>\n</function>",
        "",
        [("weather", '{"city": "[1]"}')],
    ),
    ("<function=", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", "", [("now", "{}")]),
    (
        "<arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>ok</arg_key>\n"
        "<arg_value>true</arg_value>\n</tool_call>",
        "",
        [("weather", '{"city": "Paris", "ok": true}')],
    ),
    (
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "",
        [PARIS],
    ),
    ("<|tool_call|>", f"<|tool_call|>[{OBJECT}]", "", [PARIS]),
    ("<|tool_call|>", f"<|tool_call|>[{OBJECT}]<|/tool_call|>", "", [PARIS]),
    ("<|tool|>", 'functools[{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ("<function_call>", f"<function_call> {OBJECT}", "", [PARIS]),
    (
        "<|START_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": '
        '"Paris"}}\n]<|END_ACTION|>',
        "",
        [PARIS],
    ),
    (
        "Action:",
        'Action: ```json\n[\n    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]```',
        "",
        [("now", "{}")],
    ),
    (
        "<|tool_call_start|>",
        '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>Checking.',
        "Checking.",
        [PARIS],
    ),
    ("<|tool_call_start|>", f"<|tool_call_start|>[{OBJECT}]<|tool_call_end|>", "", [PARIS]),
    ("<start_of_turn>", 'So:\n```tool_code\nprint(weather(city="Paris"))\n```', "So:\n", [PARIS]),
    (
        "<function_calls>",
        '<function_calls>\nweather(city="Paris")\nnow()\n</function_calls>',
        "",
        [PARIS, ("now", "{}")],
    ),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [PARIS],
    ),
    ("<|recipient|>", '<|from|>assistant\n<|recipient|>weather\n<|content|>{"city": "Paris"}<|stop|>', "", [PARIS]),
    ("<|recipient|>", "<|from|>assistant\n<|recipient|>all\n<|content|>Hello.", "Hello.", []),
    (">>>all", '>>>all\nI look.\n>>>weather\n{"city": "Paris"}', "I look.\n", [PARIS]),
    (
        "<tool_calls>",
        '<tool_calls><tool_call>weather\n```json\n{"city": "Paris"}\n```</tool_call></tool_calls>',
        "",
        [PARIS],
    ),
    (
        "<|tools_prefix|>",
        '<|tools_prefix|>[{"weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>',
        "",
        [PARIS, ("now", "{}")],
    ),
    (
        "<|action_start|>",
        '<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Paris"}}<|action_end|>',
        "",
        [PARIS],
    ),
    (
        "<|channel|>",
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}',
        "",
        [PARIS],
    ),
    (
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        "Hi.",
        [],
    ),
]

# What stands behind a call's arguments and is no part of it, and what the text of the answer is then.
BEHIND: list[tuple[str, str, list[tuple[str, str]]]] = [
    ('{"name": "weather", "arguments": {"city": "Paris"}, "response": "sunny"}', "", [PARIS]),
    ('```json\n{"name": "weather", "arguments": {"city": "Paris"},\n "response": "sunny"\n}\n```', "", [PARIS]),
    ('```json\n{"name": "weather", "arguments": {"city": "Paris"}, "x": [{"a": "}"}]}\n```\nSo.', "So.", [PARIS]),
    ('{{"name": "weather", "arguments": {"city": "Paris"}, "response": {"a": [1, "]"]}}}', "", [PARIS]),
    ('{{"name": "weather", "arguments": {"city": "Paris"}}, "response": "sunny"}', "", [PARIS]),
    ('{{"name": "weather", "arguments": {"city": "Paris"}}} It is.', " It is.", [PARIS]),
    (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}, "result": null, "b": 2}\n</tool_call>',
        "",
        [PARIS],
    ),
    ('<tool_call>\n{{"name": "weather", "arguments": {"city": "Paris"}, "a": "b"}}\n</tool_call>', "", [PARIS]),
    ('<tools>{"name": "weather", "arguments": {"city": "Paris"}, "a": sunny today}</tools> Yes', " Yes", [PARIS]),
    ('{"name": "weather", "arguments": {"city": "Paris"}, }', "", [PARIS]),
    ('{"name": "weather", "arguments": {"city": "Paris"}, "a": "cut o', "", [PARIS]),
    ('{"name": "weather", "arguments": {"city": "Paris"}, "a', "", [PARIS]),
    ('{"name": "weather", "arguments": {"city": "Paris"},', "", [PARIS]),
    ('{"name": "weather", "arguments": {"city": "Paris"}, "a": {"b": [1, ', "", [PARIS]),
    ('{"name": "weather", "arguments": {"city": "Paris"}}, "quoted": text', ', "quoted": text', [PARIS]),
    ('{"arguments": {"city": "Paris"}, "name": "weather", "response": "sunny"}', "", [PARIS]),
    ('{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}", "response": "sunny"}', "", [PARIS]),
    (
        '{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}, "x": 1}, "y": [2]}',
        "",
        [PARIS],
    ),
    (
        '[{"name": "weather", "arguments": {"city": "Paris"}, "a": 1}, {"name": "now", "arguments": {}, "b": {}}]',
        "",
        [PARIS, ("now", "{}")],
    ),
    (
        '[{"name": "weather", "arguments": {"city": "Paris"}}, {"celsius": 21}, {"name": "now", "arguments": {}}] So',
        " So",
        [PARIS, ("now", "{}")],
    ),
    ('[{"name": "weather", "arguments": {"city": "Paris"}}, "text", 3, {"a": "cut', "", [PARIS]),
    (f'{OBJECT[:-1]}, "a": 1}}\n{OBJECT[:-1]}, "a": 1}}\nDone', "Done", [PARIS, PARIS]),
]


@pytest.mark.parametrize(("text", "told", "calls"), BEHIND)
def test_what_stands_behind_the_arguments_is_no_text(text: str, told: str, calls: list[tuple[str, str]]) -> None:
    for cut in (False, True):
        for cuts in ((), range(len(text))):
            said, made = read(text, cuts, cut=cut)
            assert (said.strip(), made) == (told.strip(), calls)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.data(),
)
def test_any_member_behind_the_arguments_is_dropped(value: Any, data: st.DataObject) -> None:
    inner = f'{{"name": "weather", "arguments": {{"city": "Paris"}}, "more": {json.dumps(value)}}}'
    opening, closing = data.draw(
        st.sampled_from([("", ""), ("{", "}"), ("[", "]"), ("```json\n", "\n```"), ("<tool_call>", "</tool_call>")])
    )
    text = opening + inner + closing
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert read(text, cuts) == ("", [PARIS])


PLAIN = [
    "Hello {name}, [1, 2] and `code`.",
    '{"name": "Ada", "arguments": {"a": 1}}',  # no tool has this name
    '{"name": "weather", "age": 30}',
    '{"name": "weather", "arguments": [1]}',
    '{"city": "Paris"}',
    f"Like this:\n```json\n{OBJECT}\n```\nThat is all.",  # a quotation
    f"To call it, write {OBJECT}",
    '```json\n{"name": "Ada"}\n```',
    "```python\nweather()\n```",
    '[other(city="Paris")]',
    "[weather]",
    '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
    "<tool_call> is a tag",
    " \n ",
    "",
]


@pytest.mark.parametrize(("sign", "text", "told", "calls"), WRITTEN)
def test_each_family(sign: str, text: str, told: str, calls: list[tuple[str, str]]) -> None:
    assert read(text, (), sign) == (told, calls)
    assert read(text, range(len(text)), sign) == (told, calls)


@given(case=st.sampled_from(WRITTEN), data=st.data())
def test_the_pieces_do_not_matter(case: tuple[str, str, str, list[tuple[str, str]]], data: st.DataObject) -> None:
    sign, text, told, calls = case
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=9))
    assert read(text, sorted(cuts), sign) == (told, calls)


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_is_left_alone(text: str) -> None:
    signs = " ".join(sign for dialect in DIALECTS.values() for sign in dialect.signs)
    for sign in ("", signs):
        assert read(text, (), sign) == (text, [])
        assert read(text, range(len(text)), sign) == (text, [])


@given(text=st.text(alphabet='<tool_cal>/{}[]("name: \n`', max_size=60), cut=st.integers(0, 60))
def test_anything(text: str, cut: int) -> None:
    assert read(text, [min(cut, len(text))]) == (text, [])


def test_every_dialect_is_tried() -> None:
    assert all(any(sign in dialect.signs for sign, *_ in WRITTEN) for dialect in DIALECTS.values())


def test_text_is_held_back_no_longer_than_needed() -> None:
    parser = ToolParser(OFFERED)
    for text in ("Hel", "lo <", "b> ", '{"name": "weather", "arguments": {'):
        assert pieces(parser, text)
    assert pieces(ToolParser(OFFERED), '{"names"') == [PlainText('{"names"')]
    assert pieces(ToolParser(OFFERED), '```json\n{"name": "Ada"') == [PlainText('```json\n{"name": "Ada"')]
    parser = ToolParser(OFFERED)
    start, arguments = pieces(parser, '<tool_call>\n{"name": "weather", "arguments": {"ci')
    assert isinstance(start, CallStart)
    assert arguments == CallArguments(0, '{"ci')
    assert pieces(parser, 'ty"') == [CallArguments(0, 'ty"')]
    assert not parser.complete


@pytest.mark.parametrize(
    ("sign", "text", "calls"),
    [
        ("", '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', [("weather", '{"city": "Pa')]),
        ("", '```json\n{\n  "name": "weather",\n  "arguments"', []),
        ("", '<tool_call>\n{"name": "wea', []),
        ("<function=", "<tool_call>\n<function=weather>\n<parameter=city>\nPa", [("weather", '{"city": "Pa"')]),
        ("", '[weather(city="Pa', [("weather", "{")]),
    ],
)
def test_a_call_that_is_cut_off(sign: str, text: str, calls: list[tuple[str, str]]) -> None:
    """It is no text, and does not look complete."""
    assert read(text, (), sign, cut=True) == ("", calls)
    parser = ToolParser(OFFERED, formats_of(sign, ()))
    pieces(parser, text)
    pieces(parser, "", ended=True, cut=True)
    assert not (parser.calls and parser.complete)


def test_one_call_at_most() -> None:
    assert read(f"{HERMES}\n{HERMES}", max_calls=1) == ("", [PARIS])
    assert read(f"[{OBJECT}, {OBJECT}]", max_calls=1) == ("", [PARIS])


def test_an_answer_that_must_call_has_nothing_else() -> None:
    reading = ToolParserFactory(OFFERED, only_calls=True)
    parser = reading()
    assert pieces(parser, "<tool") == []
    assert pieces(parser, "", ended=True, cut=True) == []
    assert pieces(reading(), "Well. ") == []
    start, *_ = pieces(reading(), HERMES)
    assert isinstance(start, CallStart)


def test_ids_fit_mistral() -> None:
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in (new_id(), new_id()))
