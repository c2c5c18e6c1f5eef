"""Grammars: sampled text follows them under every schedule."""

import json
import re
from collections.abc import Callable
from typing import Any

import llguidance
import pytest

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.server.grammar import Grammars, choice, json_schema, lark, regex
from twostroke.server.tools import grammar
from twostroke.server.tools.grammars import MAX_CALLS

FUNCTIONS: list[dict[str, Any]] = [
    {"name": "now"},
    {"name": "weather", "parameters": {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}}},
]


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
        (lambda: regex("a" * 20_001), "20,000 characters is too large"),
        (lambda: choice(["a", "\ud800"]), "text 1 has half of a surrogate pair"),
        (lambda: choice(["a"] * 10_001), "10,000 texts is too large"),
        (lambda: lark("start: foo"), 'unknown name: "foo"$'),
        (lambda: lark("start: start"), "NoExtension"),
        (lambda: lark("no grammar"), "not a grammar: Expected"),
        (lambda: "x" * 1_000_001, "1,000,000 characters is too large"),
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
    assert takes('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>') is not required  # it is text
    assert not takes(call.replace('"c"', '"k"'))
    fenced = '```json\n{\n  "name": "weather",\n  "arguments": {"unit": "c"}\n}\n```'
    assert takes(fenced) is not required
    assert not takes(fenced.replace('"c"', '"k"'))


@pytest.mark.parametrize("answer", [None, {"type": "integer"}])
def test_an_answer_that_must_call_ends(answer: dict[str, Any] | None) -> None:
    """Though a model may never take its end token."""
    text = grammar(FUNCTIONS, required=answer is None, parallel=True, answer=answer)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(text, "\n".join([call] * MAX_CALLS))
    assert not accepts(text, "\n".join([call] * MAX_CALLS) + "\n", whole=False)


def test_a_tag_begins_a_call_of_an_offered_function(open_tiny: Callable[..., LLM]) -> None:
    """Where the model's family writes nothing else behind `<tool_call>`."""
    llm = open_tiny()
    grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
    name = llm.tokenizer.encode('<tool_call>\n{"name": "other', add_bos=False)
    for tagged in (False, True):
        follower = grammars.compile(grammar(FUNCTIONS, required=False, parallel=True, tagged=tagged))()
        allowed = True
        for id in name:
            if allowed := bool(follower.mask()[id]):
                follower.advance(id)
            else:
                break
        assert allowed is not tagged


def test_special_tokens_that_calls_are_written_with(open_tiny: Callable[..., LLM]) -> None:
    """A grammar of text lets them through where they are named."""
    llm = open_tiny()
    grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
    (mark,) = llm.tokenizer.encode("<s>", add_bos=False)
    call = llm.tokenizer.encode('{"name": "now", "arguments": {}}', add_bos=False)
    for marks in ((), (mark,)):
        follower = grammars.compile(grammar(FUNCTIONS, required=False, parallel=True, marks=marks))()
        assert follower.mask()[mark] == bool(marks)
    for id in [mark, *call, mark, *call]:
        assert follower.mask()[id]
        follower.advance(id)
    assert follower.mask()[min(llm.tokenizer.eos_ids)]


@pytest.mark.parametrize("required", [True, False])
def test_a_schema_that_cannot_be_followed(required: bool, open_tiny: Callable[..., LLM]) -> None:
    """Is told in a warning and leaves the arguments free; it is refused if it is strict."""
    llm = open_tiny()
    grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
    bad: dict[str, Any] = {"name": "bad", "parameters": {"type": "banana"}}
    warnings: list[str] = []
    text = grammar([*FUNCTIONS, bad], required=required, parallel=True, warnings=warnings)
    assert len(warnings) == 1
    assert "bad" in warnings[0]
    follower = grammars.compile(text)()
    for id in llm.tokenizer.encode('<tool_call>\n{"name": "bad", "arguments": {"any": [1]}}', add_bos=False):
        assert follower.mask()[id]
        follower.advance(id)
    with pytest.raises(InvalidRequest, match="bad"):
        grammar([{**bad, "strict": True}], required=required, parallel=True)


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (r"\d{2}", ["12"], ["\u0661\u0662", "1", "123"]),
        (r"^\w+$", ["a_1"], ["é", ""]),
        (r"[^\d]", ["é"], ["1", "\u0661"]),
        (r"a{,2}", ["", "aa"], ["aaa"]),
        (r"(?P<year>\d)|^b$", ["1", "b"], ["a"]),
        (r"\Aab\Z", ["ab"], ["abb"]),
        (r"(?i)yes", ["YES"], ["no"]),
        (r"[[:alpha:]]\p{L}", ["aé"], ["1a", "h]"]),
    ],
)
def test_regular_expressions_are_those_of_python(pattern: str, accepted: list[str], refused: list[str]) -> None:
    for text in (*accepted, *refused):
        assert accepts(regex(pattern), text) == (text in accepted), text


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "object"}, {"type": "string"}]},
        {"type": "string"},
        {"enum": [1]},
    ],
)
def test_arguments_are_an_object(parameters: dict[str, Any]) -> None:
    """Whatever the schema allows besides, or instead: nothing else is a call."""
    function, told = {"name": "f", "parameters": parameters}, list[str]()
    text = grammar([function], required=True, parallel=False, warnings=told)
    begun = '<tool_call>\n{"name": "f", "arguments": '
    for value, fits in (("{", True), ("n", False), ('"', False), ("1", False)):
        assert accepts(text, begun + value, whole=False) == fits
    assert bool(told) == (parameters in ({"type": "string"}, {"enum": [1]}))
    if told:
        with pytest.raises(InvalidRequest, match="the parameters of f: #: nothing satisfies"):
            grammar([{**function, "strict": True}], required=True, parallel=False)


def test_an_answer_by_a_schema_or_calls() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    functions = [{"name": "f", "parameters": schema}, {"name": "g"}]
    text = grammar(functions, required=False, parallel=True, answer={"type": "integer"})
    call = '<tool_call>\n{"name": "f", "arguments": {"name": "x"}}\n</tool_call>'
    accepted = ["-7", call, f"{call}\n{call}", '{"name": "g", "parameters": {}}']
    refused = ["x", '{"name": "f", "arguments": {}}', '{"name": "h", "arguments": {}}', f"7{call}", f"{call} 7"]
    for answer in (*accepted, *refused):
        assert accepts(text, answer) == (answer in accepted), answer


def accepts(text: str, answer: str, whole: bool = True) -> bool:
    """Whether a grammar accepts an answer, or one that begins so."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text, log_level=0)
    read = list(answer.encode())
    return matcher.try_consume_tokens(read) == len(read) and (not whole or matcher.is_accepting())
