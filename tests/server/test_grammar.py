"""Grammars: sampled text follows them under every schedule. Tool calls: parsed from text in any pieces."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.errors import InvalidRequest
from twostroke.llm import LLM
from twostroke.server.grammar import Grammars, choice, json_schema, lark, regex
from twostroke.server.tool_parser import CallArguments, CallStart, Piece, PlainText, ToolParser
from twostroke.server.tools import described, grammar

FUNCTIONS: list[dict[str, Any]] = [
    {"name": "now"},
    {"name": "weather", "parameters": {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}}},
]
TEXT = (
    'Let me <look>.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
    '{"name": "weather", "arguments": {"unit": "}\\"{", "at": [{"x": 1}]}}\n</tool_call> Done <tool'
)


def test_the_same_under_every_schedule(open_tiny: Callable[..., LLM]) -> None:
    """Alone, batched, chunked, cold, warm and preempted."""
    roomy = open_tiny()
    grammars = Grammars(roomy.tokenizer, roomy.config.vocab_size)
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 30, "maxLength": 40}}}
    constraint = grammars.compile(json_schema({**schema, "required": ["a"], "additionalProperties": False}))
    options: Any = {"constraint": constraint, "temperature": 1.0, "seed": 2, "n": 3, "max_tokens": 200}
    prompts = [[k + 5] * 30 for k in range(4)]
    alone = [roomy.generate([prompt], **options)[0].outputs for prompt in prompts]
    for outputs in alone:
        for output in outputs:
            assert 30 <= len(json.loads(output.text)["a"]) <= 40
            assert output.finish_reason == "stop"
    tight = open_tiny(kv_bytes=24 * roomy.pool.page_bytes, max_step_tokens=16)
    for llm in (roomy, tight, tight):
        made = [completion.outputs for completion in llm.generate(prompts, **options)]
        assert [[o.text for o in outputs] for outputs in made] == [[o.text for o in outputs] for outputs in alone]
    assert tight.engine.preemptions > 0


def test_regex_choice_and_lark(open_tiny: Callable[..., LLM]) -> None:
    llm = open_tiny()
    grammars = Grammars(llm.tokenizer, llm.config.vocab_size)

    def made(text: str) -> str:
        return llm.generate([[5]], constraint=grammars.compile(text), max_tokens=50, min_tokens=9)[0].text

    assert re.fullmatch(r"[a-c]{4}é\d", made(regex(r"[a-c]{4}é\d")))
    assert made(choice(['say "no"', "yes\\"])) in ('say "no"', "yes\\")
    assert made(choice(["é😀", "\x00\n"])) in ("é😀", "\x00\n")
    assert made(choice([f"v{place}" for place in range(10_000)])).startswith("v")
    assert re.fullmatch("[ab]1", made(lark('start: ("a" | "b") "1"')))
    assert re.fullmatch("[ab]1", made(lark('root ::= [ab] "1"')))


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: regex("(a"), "unclosed group$"),
        (lambda: regex("(?=a)b"), "look-around"),
        (lambda: regex(r"\bfoo"), "lookarounds not supported"),
        (lambda: regex("a{99999}{99999}"), "too many expressions|too big|cannot"),
        (lambda: regex("a" * 20_001), "20,000 characters is too large"),
        (lambda: choice(["a", "\ud800"]), "text 1 has half of a surrogate pair"),
        (lambda: choice(["a"] * 10_001), "10,000 texts is too large"),
        (lambda: lark("start: foo"), 'unknown name: "foo"$'),
        (lambda: lark("start: start"), "NoExtension"),
        (lambda: lark("no grammar"), "not a grammar: Expected"),
        (lambda: "x" * 2_000_001, "2,000,000 characters is too large"),
    ],
)
def test_bad_grammars(make: Callable[[], str], wrong: str, open_tiny: Callable[..., LLM]) -> None:
    """One line says what is wrong."""
    llm = open_tiny()
    with pytest.raises(InvalidRequest, match=wrong) as raised:
        Grammars(llm.tokenizer, llm.config.vocab_size).compile(make())
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(("required", "parallel"), [(True, True), (True, False), (False, True), (False, False)])
def test_tool_grammar(required: bool, parallel: bool, open_tiny: Callable[..., LLM]) -> None:
    """Which tokens it accepts and rejects, one by one."""
    llm = open_tiny()
    compiled = Grammars(llm.tokenizer, llm.config.vocab_size).compile(
        grammar(FUNCTIONS, required=required, parallel=parallel)
    )

    def takes(text: str) -> bool:
        follower = compiled()
        for id in llm.tokenizer.encode(text, add_bos=False):
            if not follower.mask()[id]:
                return False
            follower.advance(id)
        return follower.finished or bool(follower.mask()[min(llm.tokenizer.eos_ids)])

    call = '<tool_call>\n{"name": "weather", "arguments": {"unit": "c"}}\n</tool_call>'
    assert takes(call)
    assert takes(f"{call}\n{call}") is parallel
    assert takes("just text <tool") is not required
    assert takes(f"text {call}") is not required
    assert not takes('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    assert not takes(call.replace('"c"', '"k"'))
    assert not takes('<tool_call>\n{"name": "now"')


def pieces(text: str, cuts: list[int]) -> list[Piece]:
    """Parse in pieces; neighbours of the same kind are joined, and ids are omitted."""
    parser, found = ToolParser(), list[Piece]()
    edges = [0, *sorted(cuts), len(text)]
    for start, stop in pairwise(edges):
        found += parser.push(text[start:stop])
    joined: list[Piece] = []
    for piece in found + parser.flush():
        match joined[-1] if joined else None, piece:
            case PlainText(before), PlainText(more):
                joined[-1] = PlainText(before + more)
            case CallArguments(index, before), CallArguments(_, more):
                joined[-1] = CallArguments(index, before + more)
            case _, CallStart(index, _, name):
                joined.append(CallStart(index, "", name))
            case _:
                joined.append(piece)
    return joined


@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=30))
def test_parser(cuts: list[int]) -> None:
    assert pieces(TEXT, cuts) == [
        PlainText("Let me <look>.\n"),
        CallStart(0, "", "now"),
        CallArguments(0, "{}"),
        CallStart(1, "", "weather"),
        CallArguments(1, '{"unit": "}\\"{", "at": [{"x": 1}]}'),
        PlainText(" Done <tool"),
    ]


@given(text=st.text(alphabet='<tool_cal>/{}"name: \n', max_size=60), cut=st.integers(0, 60))
def test_parser_of_anything(text: str, cut: int) -> None:
    """Text without tool calls is returned completely."""
    assert pieces(text, [min(cut, len(text))]) == ([PlainText(text)] if text else [])


def test_templates_that_know_no_tools() -> None:
    call = {"id": "1", "function": {"name": "now", "arguments": {}}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]
    system, user, said, result = described(messages, [{"type": "function", "function": {"name": "now"}}])
    assert system["role"] == "system"
    assert '"name": "now"' in system["content"]
    assert user == messages[0]
    assert pieces(said["content"], []) == [CallStart(0, "", "now"), CallArguments(0, "{}")]
    assert result == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
