"""JSON schemas: what a strict one's grammar allows satisfies it, by an independent validator, or it is refused."""

import json
import re
import time
from contextlib import nullcontext
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from tests.server.library_schemas import LIBRARIES
from tests.server.schemas import Schemas, Texts
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints import resolve
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.grammar import Grammar, Grammars, embedded_schema, json_schema
from twostroke.server.json_schema import enforced_schema

OPEN = {"type": "object"}
DRAFT3, DRAFT4, DRAFT7 = ({"$schema": f"http://json-schema.org/draft-0{n}/schema#"} for n in (3, 4, 7))


class Model:
    """A real model's tokenizer, without the model."""

    def __init__(self) -> None:
        checkpoint = resolve.open_checkpoint("smollm2-135m")
        size = checkpoint.config.vocab_size
        self.tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
        self.grammars, self.texts = Grammars(self.tokenizer, size), Texts(self.tokenizer, size)

    def samples(self, grammar: Grammar | str, count: int = 6) -> list[str]:
        """The texts of some seeds, those that end."""
        compiled = self.grammars.compile(grammar)
        texts = (self.texts.one(compiled(), seed) for seed in range(count))
        return [text for text in texts if text is not None]

    def takes(self, grammar: Grammar | str, text: str) -> bool:
        """Whether a grammar allows a text, with bytes as tokens where needed."""
        follower = self.grammars.compile(grammar)()
        for token in self.tokenizer.encode(text, add_bos=False):
            if not follower.mask()[token]:
                return False
            follower.advance(token)
        return follower.finished or bool(follower.mask()[min(self.tokenizer.eos_ids)])


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a key is there twice: {pairs}"
    return dict(pairs)


def check(schema: dict[str, Any], text: str) -> None:
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text, object_pairs_hook=unique))


def attempt(schema: dict[str, Any], strict: bool = True) -> tuple[Grammar | None, str]:
    """A schema's grammar, or why it is refused."""
    try:
        return json_schema(schema, strict), ""
    except InvalidRequest as error:
        return None, str(error)


@pytest.mark.parametrize("block", range(10))
def test_random_schemas(block: int, model: Model) -> None:
    """Strict: valid for every seed, or refused in one line with a keyword. Not strict: always JSON."""
    compiled = 0
    for seed in range(block * 12, block * 12 + 12):
        schema = Schemas(seed).document()
        grammar, refusal = attempt(schema)
        if grammar is None:
            assert re.fullmatch(r"[^\n]{10,600}", refusal)
            assert re.search(r"'[\w$]+'|false", refusal), "it names a keyword"
            assert "#" in refusal, "and where it is"
            continue
        compiled += 1
        for text in model.samples(grammar, 4):
            check(schema, text)
        for text in model.samples(json_schema(schema, strict=False), 1):
            json.loads(text, object_pairs_hook=unique)
    assert compiled >= 3


KEPT: dict[str, dict[str, Any]] = {
    "escapes of a key": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    "double rounding": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "tiny bounds": {"type": "number", "minimum": 1e-7, "maximum": 2e-7},
    "integers past a double": {"type": "integer", "minimum": 2**53 + 1, "maximum": 10**17 + 1},
    "a large bound": {"type": "integer", "maximum": 10**30},
    "halves": {"type": "number", "multipleOf": 0.5},
    "a float as a whole step": {"type": "integer", "multipleOf": 1000.0},
    "1 and 1.0": {"enum": [1, 1.0, True], "type": "integer"},
    "objects as values": {"enum": [{"a": [1, {}]}, [], "é😀\n"]},
    "lengths in code points": {"type": "string", "minLength": 2, "maxLength": 2, "pattern": "^[😀é]+$"},
    "search": {"type": "string", "pattern": "[0-9]b|^c", "maxLength": 6},
    "unicode digits": {"type": "string", "pattern": r"^\d\w\s\D\W\S$"},
    "a dot": {"type": "string", "pattern": "^.{3}$"},
    "siblings of a reference": {"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer", "maximum": 4}}},
    "recursion": {"type": "object", "properties": {"a": {"$ref": "#"}, "n": {"type": "null"}}, "required": ["n"]},
    "a union's siblings": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "merged objects": {
        "allOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 5}, "b": {"type": "null"}}, "additionalProperties": False},
        ]
    },
    "apart by a const": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": k}, "v": {"type": k}}, "required": ["k"]}
            for k in ("integer", "string")
        ]
    },
    "patterns of names": {
        "type": "object",
        "properties": {"x-a": {"type": "string"}},
        "patternProperties": {"^x-": {"maxLength": 2}},
        "additionalProperties": {"type": "integer"},
    },
    "names by a pattern": {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "minProperties": 2},
    "names by a list": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
    "a map with a count": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2},
    "required without properties": {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
    "a forbidden property": {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
    "a tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 1},
    "a short tuple": {"type": "array", "prefixItems": [{"type": "null"}, False], "maxItems": 3},
    "one item is unique": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"type": "null"}},
    "draft 7": {**DRAFT7, "type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}},
    "draft 7's references": {**DRAFT7, "$ref": "#/definitions/a", "type": "null", "definitions": {"a": {"const": 1}}},
    "definitions": {"$ref": "#/definitions/a~1b%25", "definitions": {"a/b%": {"type": "null"}}},
    "a null type": {"type": ["string", "null"], "maxLength": 3},
    "no type": {"properties": {"a": {"minimum": 3}}, "required": ["a"]},
    "an unknown keyword": {"type": "string", "nullable": True, "maxLength": 3},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    },
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str, model: Model) -> None:
    texts = model.samples(json_schema(KEPT[name]), 12)
    assert texts
    for text in texts:
        check(KEPT[name], text)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"$ref": "#"}, "'$ref' at #/$ref: it leads back to itself"),
        ({"$ref": "http://example.com/a.json"}, "'$ref' at #/$ref"),
        ({"$ref": "#/$defs/none"}, "'$ref' at #/$ref"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "#/properties/a: '$ref' leads back to itself",
        ),
        ({"type": "banana"}, "'type' at #/type: there is no type \"banana\""),
        (
            {"properties": {"a/b": {"type": "array", "uniqueItems": True}}},
            "'uniqueItems' at #/properties/a~1b/uniqueItems",
        ),
        ({"type": "array", "contains": {"const": 1}}, "'contains' at #/contains"),
        ({"type": "array", "items": {"type": "array", "unevaluatedItems": False}}, "'unevaluatedItems' at #/items/"),
        ({"type": "string", "pattern": "(?=a)b"}, "'pattern' at #/pattern: lookarounds"),
        ({"type": "string", "pattern": r"(a)\1"}, "'pattern' at #/pattern: backreferences"),
        ({"type": "string", "pattern": "(a"}, "'pattern' at #/pattern: it is no regular expression"),
        ({"type": "string", "pattern": r"^\p{L}$"}, "'pattern' at #/pattern: it is no regular expression"),
        ({"type": "string", "pattern": "x(^a)?"}, "'pattern' at #/pattern: it cannot be followed (lookarounds"),
        ({"type": "string", "pattern": r"^[^\W_]$"}, r"'pattern' at #/pattern: \W is not supported"),
        ({"type": "string", "pattern": "^a++$"}, "'pattern' at #/pattern: possessive repeats"),
        ({"$ref": "#here", "$defs": {"n": {"$anchor": "here", "type": "null"}}}, "'$ref' at #/$ref: only references"),
        ({"properties": {"a": {}}, "if": {"required": ["a"]}, "then": {}}, "'if' at #/if: it cannot be guaranteed"),
        ({"properties": {"a": {}}, "not": {"required": ["a"]}}, "'not' at #/not: it cannot be guaranteed"),
        ({"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, "'dependentRequired' at #/dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "'unevaluatedProperties' at #/unevaluatedProperties"),
        (
            {**DRAFT4, "minimum": 3, "exclusiveMinimum": True},
            "'exclusiveMinimum' at #/exclusiveMinimum: it is a number",
        ),
        (
            {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#"}, {"required": ["a"]}]}}},
            "circular references",
        ),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "nothing satisfies 'type', 'pattern', 'minLength'"),
        ({"type": "string", "format": "regex"}, "'format' at #/format"),
        ({"type": "string", "minLength": 10**9}, "'minLength' at #/minLength"),
        ({"type": "array", "minItems": 10**9}, "'minItems' at #/minItems"),
        ({"type": "number", "multipleOf": 0.01}, "'multipleOf' at #/multipleOf: validators round"),
        ({"type": "integer", "minimum": "3"}, "'minimum' at #/minimum: it is a number"),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": 3}, "'exclusiveMinimum' at #/exclusiveMinimum"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#: nothing satisfies 'type', 'minimum', 'maximum'"),
        ({"type": "integer", "minimum": 10**19}, "#: nothing satisfies"),
        ({"type": "integer", "minimum": 10**400}, "'minimum' at #/minimum: it is a number, and a double holds it"),
        ({"type": "number", "multipleOf": 10**400}, "'multipleOf' at #/multipleOf: it is a number"),
        ({"type": "string", "maxLength": 10**400}, "'maxLength' at #/maxLength"),
        ({"enum": []}, "#: nothing satisfies 'enum'"),
        ({"const": "\x00"}, "'const' at #/const: it has a control character"),
        ({"const": 10**30}, "'const' at #/const"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' at #/oneOf: its options may hold at once"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "'oneOf' at #/oneOf"),
        ({"type": "string", "not": {"pattern": "a"}}, "'not' at #/not"),
        ({"type": "array", "items": [{"type": "null"}]}, "'items' at #/items: a list is for drafts before 2020-12"),
        ({"type": "object", "required": "a"}, "'required' at #/required: it is a list of names"),
        ({"minItems": 3, "required": [{}]}, "'required' at #/required: it is a list of names"),
        ({"type": "object", "properties": [1]}, "'properties' at #/properties: it is an object"),
        ({"type": "object", "patternProperties": {"^(a|b)$": {}}}, "'patternProperties' at #/patternProperties"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "its patterns overlap"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "'propertyNames' at #/propertyNames"),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, "'minProperties' at #/minProperties"),
        (
            {"allOf": [{"properties": {"a": {}}, "unevaluatedProperties": False}]},
            "'unevaluatedProperties' at #/allOf/0/",
        ),
        ({"anyOf": "x"}, "'anyOf' at #/anyOf: it is a list of schemas"),
        ({"items": 3}, "'items' at #/items: this is no schema"),
        (DRAFT3, "'$schema' at #/$schema"),
        ({"properties": {"a": {"$id": "http://x/y", "$ref": "#/z"}}}, "'$id' at #/properties/a/$id"),
    ],
)
def test_refused(schema: dict[str, Any], where: str, model: Model) -> None:
    """In one line that names the keyword and its place. Without strict, it is skipped and told."""
    with pytest.raises(InvalidRequest) as raised:
        json_schema(schema)
    assert where in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    warnings: list[str] = []
    loose = json_schema(schema, strict=False, warnings=warnings)
    enforced = schema in ({"type": "number", "multipleOf": 0.01}, {"type": "string", "pattern": r"^\p{L}$"})
    assert bool(warnings) is not enforced
    assert all("\n" not in warning for warning in warnings)
    for text in model.samples(loose, 3):
        json.loads(text)


def test_only_the_keyword_is_skipped(model: Model) -> None:
    """The rest of a schema that is not strict is enforced."""
    warnings: list[str] = []
    items = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 3}
    schema = {"type": "object", "properties": {"tags": items, "n": {"type": "integer"}}, "required": ["tags", "n"]}
    grammar = json_schema(schema, strict=False, warnings=warnings)
    (warning,) = warnings
    assert warning.startswith("'uniqueItems' at #/properties/tags/uniqueItems is skipped")
    assert model.takes(grammar, '{"tags": ["a", "a"], "n": 3}')
    assert not model.takes(grammar, '{"tags": ["c"], "n": 3}')
    warnings.clear()
    cents = json_schema({"type": "number", "multipleOf": 0.01}, strict=False, warnings=warnings)
    assert not warnings, "it is enforced: only validators round"
    assert model.takes(cents, "0.07")
    assert not model.takes(cents, "0.071")
    letters = json_schema({"type": "string", "pattern": r"^\p{L}+$"}, strict=False, warnings=warnings)
    assert model.takes(letters, '"aé"')
    assert not model.takes(letters, '"a1"')


ENFORCED_OTHERWISE: list[tuple[dict[str, Any], str, str, str]] = [  # a schema, what is said, a text that fits, and not
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "'oneOf' at #/oneOf is enforced as anyOf: its options may hold at once",
        "1",
        '"a"',
    ),
    (
        {"type": "array", "items": [{"type": "null"}]},
        "'items' at #/items is read as prefixItems: a list is for drafts before 2020-12",
        "[null]",
        "[1]",
    ),
    ({"enum": ["\x00", "a"]}, "'enum' at #/enum is enforced without some values: it has a control", '"a"', '"b"'),
    (
        {"type": "object", "patternProperties": {"^(a|b)$": {"type": "null"}}},
        "'patternProperties' at #/patternProperties is enforced, but keys may be there twice",
        '{"a": null}',
        '{"c": null}',
    ),
    (
        {"type": "object", "patternProperties": {"a": {}, "b": {}}, "additionalProperties": {"const": 1}},
        "'patternProperties' at #/patternProperties is skipped: its patterns overlap",
        '{"x": 1}',
        '{"x": 2}',
    ),
    (
        {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        "'minProperties' at #/minProperties is skipped: beside optional properties it is not supported",
        '{"a": 1}',
        '{"d": 1}',
    ),
    ({"type": "string", "not": {"const": "a"}}, "'not' at #/not is skipped: it cannot be guaranteed", '"a"', "1"),
    ({"type": "string", "format": "phone"}, "'format' at #: 'phone' is not checked", '"a"', "1"),
    (
        {"type": "string", "nullable": True},
        "'nullable' at # is not a keyword of JSON Schema, and is ignored",
        '"a"',
        "null",
    ),
    ({"anyOf": [{"type": "null"}, 3]}, "'1' at #/anyOf/1 is skipped: this is no schema", "[]", "x"),
    ({"type": "string", "enum": [1]}, "the schema is not enforced, any JSON object is: #: nothing", "{}", "1"),
]


@pytest.mark.parametrize(("schema", "said", "fits", "fails"), ENFORCED_OTHERWISE)
def test_warnings_say_what_is_enforced(schema: dict[str, Any], said: str, fits: str, fails: str, model: Model) -> None:
    with pytest.raises(InvalidRequest) if "format" not in schema and "nullable" not in schema else nullcontext():
        json_schema(schema)
    warnings: list[str] = []
    grammar = json_schema(schema, strict=False, warnings=warnings)
    (warning,) = warnings
    assert warning.startswith(said)
    assert model.takes(grammar, fits)
    assert not model.takes(grammar, fails)


@pytest.mark.parametrize("name", LIBRARIES)
def test_schemas_that_libraries_write(name: str, model: Model) -> None:
    texts = model.samples(json_schema(LIBRARIES[name]), 12)
    assert texts
    for text in texts:
        check(LIBRARIES[name], text)


TAGGED: dict[str, Any] = {  # pydantic's, where a tag has a default
    "discriminator": {"propertyName": "kind"},
    "oneOf": [{"type": "object", "properties": {"kind": {"const": one}, "a": {"type": "null"}}} for one in "xy"],
}


def test_a_union_without_required_tags_gets_them(model: Model) -> None:
    grammar = json_schema(TAGGED)
    assert model.takes(grammar, '{"kind": "x", "a": null}')
    assert not model.takes(grammar, '{"a": null}')
    with pytest.raises(InvalidRequest, match="may hold at once"):
        json_schema({"oneOf": TAGGED["oneOf"]})


def test_what_options_exclude_is_read_as_it_is_written() -> None:
    """Not as it is generated: objects are open, formats are annotations, and 1 is 1.0."""
    one, two = ({"type": "object", "properties": {name: {"type": "null"}}} for name in "ab")
    for options in (
        [one, two],
        [{**one, "required": ["a"]}, two | {"properties": {"a": {}, "b": {}}}],
        [{"type": "string", "format": "email"}, {"type": "string", "format": "uri"}],
        [{"const": 1.0}, {"enum": [1, 2]}],
        [{**one, "required": ["z"]}, {**two, "properties": {"b": {}, "z": {}}, "required": ["b"]}],
        [{"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object", "properties": {"a": {"const": 2}}}],
    ):
        with pytest.raises(InvalidRequest, match="may hold at once"):
            json_schema({"oneOf": options})
    old = {"$ref": "#/definitions/n", "minimum": 5}  # draft 7 ignores what stands beside a reference
    with pytest.raises(InvalidRequest, match="may hold at once"):
        json_schema({**DRAFT7, "oneOf": [old, {"const": 1}], "definitions": {"n": {"type": "integer"}}})
    with pytest.raises(InvalidRequest, match="may hold at once"):  # no tag
        json_schema({"oneOf": [{**one, "required": ["a"]}, {**two, "required": ["b"]}]})
    json_schema({"oneOf": [{"const": 1}, {"const": "a"}, {"enum": [3, "b"]}, {"type": "null"}]})


def test_closed_by_default(model: Model) -> None:
    """Objects have no properties but their own, unless the schema says so, or names none."""
    plain: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert model.takes(json_schema(plain), '{"a": 1}')
    assert not model.takes(json_schema(plain), '{"a": 1, "b": 2}')
    assert model.takes(json_schema({**plain, "additionalProperties": True}), '{"a": 1, "b": 2}')
    assert model.takes(json_schema({**plain, "additionalProperties": {"const": 2}}), '{"a": 1, "b": 2}')
    assert model.takes(json_schema(OPEN), '{"a": 1, "b": {"c": []}}')
    assert not model.takes(json_schema({"type": "object", "properties": {}}), '{"a": 1}')
    assert json_schema(with_nested := {"type": "object", "properties": {"a": plain}}).json_after is None
    assert not model.takes(json_schema(with_nested), '{"a": {"a": 1, "b": 2}}')
    assert embedded_schema(plain)["additionalProperties"] is False


def test_keys_differ(model: Model) -> None:
    """Of open objects too, in every spelling, at every depth, and in every object anew."""
    grammar = json_schema(OPEN)
    assert model.takes(grammar, '{"a": {"a": 1}, "ab": [{"a": 1}, {"a": 2}]}')
    for text in ('{"a": 1, "a": 2}', '{"\\"": 1, "\\"": 2}', '{"x": {"a": 1, "b": 2, "a": 3}}', '{"\\u0061": 1}'):
        assert not model.takes(grammar, text), text
    keys = json_schema({"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": {"const": 1}})
    for text in model.samples(keys, 20):
        json.loads(text, object_pairs_hook=unique)


def test_keys_differ_after_a_marker(model: Model) -> None:
    """The JSON in other text, such as calls of tools."""
    inside = json.dumps(embedded_schema(OPEN))
    grammar = Grammar(f'start: ("<c>" value)+ "."\nvalue: %json {inside}', json_after="<c>")
    assert model.takes(grammar, '<c>{"a": 1, "b": "<c>"}<c>{"a": 1}.')
    assert not model.takes(grammar, '<c>{"a": 1}<c>{"a": 1, "a": 2}.')


def test_whitespace_is_bounded(model: Model) -> None:
    grammar = json_schema({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}})
    assert model.takes(grammar, '{"a": [null, null]}')
    for text in ('{ "a": []}', '{"a":  []}', '{"a": [null,  null]}', '{"a": []}\n', ' {"a": []}'):
        assert not model.takes(grammar, text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(5000)}},
        {"anyOf": [{"type": "object", "properties": {"a": {"const": n}}} for n in range(3000)]},
        {
            "type": "object",
            "allOf": [{"anyOf": [{"properties": {f"p{n}": {"const": k}}} for k in "ab"]} for n in range(40)],
        },
        {"type": "string", "pattern": "^(" + "(a|b)*" * 500 + ")$"},
        {"type": "string", "pattern": "^((a{0,50}){0,50}){0,50}$"},
        {"type": "string", "pattern": "(" * 3000 + "a" + ")" * 3000},
        json.loads('{"items": ' * 900 + "{}" + "}" * 900),
        {
            "$defs": {f"n{n}": {"allOf": [{"$ref": f"#/$defs/n{n + 1}"}] * 2} for n in range(40)} | {"n40": {}},
            "$ref": "#/$defs/n0",
        },
        {"enum": ["x" * 1000 + str(n) for n in range(2000)]},
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_large_schemas_are_refused_soon(schema: dict[str, Any], strict: bool, model: Model) -> None:
    """Or compiled soon."""
    begun = time.process_time()
    grammar, refusal = attempt(schema, strict)
    assert strict or grammar is not None
    assert "\n" not in refusal
    if grammar is not None:
        model.grammars.compile(grammar)().mask()
    assert time.process_time() - begun < 8


@pytest.mark.parametrize("pattern", ["a|^b$", "^(a|b)+c?$", "x(^a)?", "[^a]b", "a{2,3}?b", "^$", r"\.\/"])
@pytest.mark.parametrize("text", ["", "a", "b", "ab", "aab", "bc", "[]", "a]", "xb", "./", "x./y"])
def test_patterns_are_pythons(pattern: str, text: str, model: Model) -> None:
    grammar, refusal = attempt({"type": "string", "pattern": pattern})
    if grammar is None:
        assert pattern == "x(^a)?"
        assert "'pattern' at #/pattern" in refusal
        return
    assert model.takes(grammar, json.dumps(text)) == (re.search(pattern, text) is not None)


@pytest.mark.parametrize("groups", [8, 32])
def test_a_union_that_costs_too_much_to_prove_is_refused(groups: int) -> None:
    """By its size alone: each option would be compared with each."""
    options = [{"oneOf": [{"const": f"{i}-{j}"} for j in range(64)]} for i in range(groups)]
    with pytest.raises(InvalidRequest, match="may hold at once"):
        enforced_schema({"oneOf": options}, strict=True)
