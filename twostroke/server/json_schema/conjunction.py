"""The keywords of a conjunction joined: types, bounds, items, properties."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llguidance

from twostroke.server.json_schema.formats import FORMATS, UNSUPPORTED
from twostroke.server.json_schema.numbers import Numbers
from twostroke.server.json_schema.patterns import Foreign, Pattern, Untranslatable, translate
from twostroke.server.json_schema.references import Part
from twostroke.server.json_schema.report import Report, pointer

# A number is an integer or a fraction.
TYPES = ("object", "array", "string", "integer", "fraction", "boolean", "null")
_NAMED = {name: {name} for name in TYPES if name != "fraction"} | {"number": {"integer", "fraction"}}
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
    *("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$defs", "definitions"),
    *("contentEncoding", "contentMediaType", "contentSchema", "then", "else", "additionalItems"),
}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_SPEAKS_OF = {  # a type
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"},
}
_NOT_ENFORCED = {"contains", "minContains", "maxContains", "unevaluatedItems"}
MOST_ITEMS = 10_000  # that an array must have
MOST_CHARACTERS = 100_000  # that a string must have


@dataclass(frozen=True)
class Items:
    """What one schema says about the items of an array."""

    first: tuple[Part, ...]
    rest: Part | None


@dataclass(frozen=True)
class Properties:
    """What one schema says about the properties of an object."""

    named: dict[str, Part]
    patterns: list[tuple[Pattern, Part]]
    others: Part | None  # additionalProperties


@dataclass
class Conjunction:
    """All that holds for a value."""

    types: set[str] = field(default_factory=lambda: set(TYPES))
    implied: set[str] = field(default_factory=set)  # types that the keywords speak of
    values: list[Any] | None = None
    numbers: Numbers = field(default_factory=Numbers)
    patterns: list[Pattern | str] = field(default_factory=list)  # a text is for the grammar library as it is
    counts: dict[str, int] = field(default_factory=dict)
    items: list[Items] = field(default_factory=list)
    properties: list[Properties] = field(default_factory=list)
    required: dict[str, str] = field(default_factory=dict)  # to the path that asks for it
    names: list[Part] = field(default_factory=list)  # propertyNames
    unevaluated: Part | None = None
    names_some: bool = False  # it has a list of properties
    values_from: tuple[str, str] = ("", "enum")  # path and keyword of `values`
    path: str = field(default="", compare=False)

    def spoken_types(self) -> set[str]:
        """The types that are generated: where none is given, those that the keywords speak of."""
        return self.types & self.implied if self.types == set(TYPES) and self.implied else self.types

    @property
    def open(self) -> bool:
        """Whether an object may have further properties."""
        return not self.names_some or self.unevaluated is not None or any(p.others is not None for p in self.properties)

    def others(self) -> list[Part]:
        """What holds for every further property."""
        found = [properties.others for properties in self.properties if properties.others is not None]
        return found if self.unevaluated is None else [*found, self.unevaluated]

    def property_names(self) -> list[str]:
        """The properties with a name, in the order of the schema."""
        named = [name for properties in self.properties for name in properties.named]
        return list(dict.fromkeys([*named, *self.required]))

    def property_parts(self, name: str) -> list[Part]:
        """What holds for a property."""
        found: list[Part] = []
        unnamed = True
        for properties in self.properties:
            mine = [part for pattern, part in properties.patterns if pattern.matches(name)]
            mine += [properties.named[name]] if name in properties.named else []
            unnamed &= not mine
            if not mine and properties.others is not None:
                mine = [properties.others]
            found += mine
        return [*found, self.unevaluated] if unnamed and self.unevaluated is not None else found

    def holds_text(self, text: str) -> bool:
        """Whether a text satisfies the keywords for texts, as far as they could be read."""
        if self.values is not None and text not in self.values:
            return False
        low, high = self.counts.get("minLength", 0), self.counts.get("maxLength", len(text))
        return low <= len(text) <= high and all(
            pattern.matches(text) for pattern in self.patterns if isinstance(pattern, Pattern)
        )


class Reader:
    """Joins the keywords of schemas without references and alternatives."""

    def __init__(self, draft: int, report: Report) -> None:
        self._draft, self._report = draft, report

    def join(self, parts: Sequence[Part]) -> Conjunction:
        """The conjunction of some schemas."""
        found = Conjunction(path=parts[0].path if parts else "")
        for part in parts:
            for keyword, value in part.schema.items():
                try:
                    self._read(found, part, keyword, value)
                except _Wrong as wrong:
                    self._report.skip(part.path, keyword, str(wrong))
            self._read_properties(found, part)
            self._read_items(found, part)
        if found.values is not None:
            found.values = [value for value in found.values if type_of(value) in found.types]
        return found

    def _read(self, found: Conjunction, part: Part, keyword: str, value: Any) -> None:
        for type_, keywords in _SPEAKS_OF.items():
            if keyword in keywords:
                found.implied.add(type_)
        if keyword in _NUMBERS:
            self._read_number(found, part, keyword, value)
        elif keyword in _COUNTS:
            self._read_count(found, keyword, value)
        elif keyword == "type":
            names = value if isinstance(value, list) else [value]
            if not all(isinstance(name, str) and name in _NAMED for name in names) or not names:
                raise _Wrong(f"there is no type {json.dumps(value):.40}")
            found.types &= set[str]().union(*(_NAMED[name] for name in names))
        elif keyword in ("enum", "const"):
            if keyword == "enum" and not isinstance(value, list):
                raise _Wrong("it is a list of values")
            _narrow(found, value if keyword == "enum" else [value])
            found.values_from = (part.path, keyword)
        elif keyword in ("pattern", "format"):
            self._read_text(found, part, keyword, value)
        elif keyword == "required":
            self._read_required(found, part, value)
        elif keyword == "propertyNames":
            found.names.append(part.at(keyword))
        elif keyword == "unevaluatedProperties":
            found.unevaluated = part.at(keyword)
        elif keyword == "uniqueItems":
            if value is not False and value is not None and found.counts.get("maxItems", 2) > 1:
                if part.schema.get("maxItems", 2) in (0, 1):
                    return
                raise _Wrong("items that differ cannot be guaranteed")
        elif keyword in _NOT_ENFORCED:
            raise _Wrong("it cannot be guaranteed")
        elif keyword in ("$id", "id") and part.path and isinstance(value, str) and not value.startswith("#"):
            if keyword == "$id" or self._draft == 4:
                raise _Wrong("only the whole schema may have an address")
        elif keyword not in _ANNOTATIONS and not any(keyword in known for known in _SPEAKS_OF.values()):
            self._report.warn(f"{keyword!r:.60} at #{part.path[-200:]} is not a keyword of JSON Schema, and is ignored")

    def _read_number(self, found: Conjunction, part: Part, keyword: str, value: Any) -> None:
        found.implied |= {"integer", "fraction"}
        numbers, schema = found.numbers, part.schema
        if keyword.startswith("exclusive") and isinstance(value, bool) and self._draft == 4:
            return  # read with the bound
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Wrong("it is a number" + (" since draft 6" if keyword.startswith("exclusive") else ""))
        if keyword.startswith("exclusive") and self._draft == 4:
            raise _Wrong("it is true or false in draft 4")
        if keyword == "multipleOf":
            if value <= 0:
                raise _Wrong("it is more than 0")
            numbers.multiple_of(value)
            if numbers.inexact_multiple:
                why = "validators round: only whole numbers and binary fractions such as 0.25 are exact"
                if self._report.strict:
                    raise _Wrong(why)
        elif keyword in ("minimum", "exclusiveMinimum"):
            old = self._draft == 4 and schema.get("exclusiveMinimum") is True
            numbers.at_least(value, old or keyword == "exclusiveMinimum")
        else:
            old = self._draft == 4 and schema.get("exclusiveMaximum") is True
            numbers.at_most(value, old or keyword == "exclusiveMaximum")

    def _read_count(self, found: Conjunction, keyword: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise _Wrong("it is a whole number, 0 or more")
        value = int(value)
        if keyword.startswith("min"):
            most = MOST_CHARACTERS if keyword == "minLength" else MOST_ITEMS
            if value > most:
                raise _Wrong(f"more than {most:,} is too large")
            found.counts[keyword] = max(value, found.counts.get(keyword, 0))
        elif value <= 1_000_000_000:
            found.counts[keyword] = min(value, found.counts.get(keyword, value))

    def _read_text(self, found: Conjunction, part: Part, keyword: str, value: Any) -> None:
        if not isinstance(value, str):
            raise _Wrong("it is a text")
        if keyword == "format":
            if value in FORMATS:
                found.patterns.append(Pattern(f"(?:{FORMATS[value]})", exact=False, endless=False))
            elif value in UNSUPPORTED:
                raise _Wrong(f"the format {value!r:.40} is not supported")
            elif "string" in found.types:
                self._report.warn(f"'format' at #{part.path[-200:]}: {value!r:.40} is not checked")
            return
        try:
            found.patterns.append(translate(value))
        except Untranslatable as why:
            if self._report.strict or not isinstance(why, Foreign) or not _compiles(value):
                raise _Wrong(str(why)) from None
            found.patterns.append(value)

    def _read_required(self, found: Conjunction, part: Part, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _Wrong("it is a list of names")
        for name in value:
            found.required.setdefault(name, part.path)

    def _read_properties(self, found: Conjunction, part: Part) -> None:
        schema = part.schema
        named, patterns, others = {}, list[tuple[Pattern, Part]](), None
        if "properties" in schema:
            if not self._is_object(part, "properties"):
                return
            found.names_some = True
            named = {name: part.at("properties", name) for name in schema["properties"]}
        if "patternProperties" in schema and self._is_object(part, "patternProperties"):
            found.names_some = True
            for pattern in schema["patternProperties"]:
                try:
                    patterns.append((translate(pattern), part.at("patternProperties", pattern)))
                except Untranslatable as why:
                    self._report.skip(pointer(part.path, "patternProperties"), pattern, str(why))
        if "additionalProperties" in schema:
            others = part.at("additionalProperties")
        if named or patterns or others is not None:
            found.properties.append(Properties(named, patterns, others))

    def _read_items(self, found: Conjunction, part: Part) -> None:
        schema = part.schema
        tuple_key = "prefixItems" if self._draft >= 2020 else "items"
        rest_key = "items" if tuple_key == "prefixItems" else "additionalItems"
        if tuple_key == "prefixItems" and isinstance(schema.get("items"), list):
            self._report.skip(
                part.path, "items", 'a list is for drafts before 2020-12: write prefixItems, or "$schema"'
            )
            tuple_key, rest_key = "items", "additionalItems"
        first: tuple[Part, ...] = ()
        if isinstance(schema.get(tuple_key), list):
            first = tuple(part.at(tuple_key, place) for place in range(len(schema[tuple_key])))
        elif tuple_key == "items":
            rest_key = "items"
        elif tuple_key in schema:
            self._report.skip(part.path, tuple_key, "it is a list of schemas")
        rest = part.at(rest_key) if rest_key in schema else None
        if first or rest is not None:
            found.items.append(Items(first, rest))

    def _is_object(self, part: Part, keyword: str) -> bool:
        if isinstance(part.schema[keyword], dict):
            return True
        self._report.skip(part.path, keyword, "it is an object")
        return False


class _Wrong(Exception):
    """Why a keyword cannot be read."""


def _compiles(pattern: str) -> bool:
    """Whether the grammar library reads a pattern by itself."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    error, _ = llguidance.LLMatcher.validate_grammar_with_warnings(
        llguidance.LLMatcher.grammar_from_json_schema(schema)
    )
    return not error


def _narrow(found: Conjunction, values: list[Any]) -> None:
    kept = {_key(value): value for value in reversed(values)}
    if found.values is None:
        found.values = list(reversed(kept.values()))
    else:
        found.values = [value for value in found.values if _key(value) in kept]


def same(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, and true is not 1."""
    return _key(first) == _key(second)


def _key(value: Any) -> Any:
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(one)) for name, one in value.items()))
    return (isinstance(value, bool), value)


def type_of(value: Any) -> str:
    """A JSON value's type, one of `TYPES`."""
    kinds: list[tuple[Any, str]] = [(bool, "boolean"), (str, "string"), (int, "integer"), (list, "array")]
    for kind, name in kinds:
        if isinstance(value, kind):
            return name
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return "null" if value is None else "object"
