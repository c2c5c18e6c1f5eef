"""Rewrite a schema so that every text which the grammar library generates for it satisfies the client's."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.server.json_schema.document import Report, check_depth, pointer, resolve
from twostroke.server.json_schema.exclusive import exclude_each_other, whole_numbers
from twostroke.server.json_schema.keywords import (
    ANNOTATIONS,
    APPLICATORS,
    COUNTS,
    SPEAKS_OF,
    TYPES,
    UNSUPPORTED,
    VALUE_RULES,
    dict_or_empty,
    is_text,
    is_writable,
    list_or_empty,
)
from twostroke.server.json_schema.library import refusal
from twostroke.server.json_schema.numbers import BOUNDS, is_exact_step, number_rules
from twostroke.server.json_schema.patterns import (
    FORMATS,
    UNSUPPORTED_FORMATS,
    Untranslatable,
    is_endless,
    is_exact,
    translate,
)

MAX_SCHEMA_CHARACTERS = 250_000
MAX_COUNTS = {"minLength": 100_000, "minItems": 10_000, "minProperties": 10_000}
ANY_OBJECT = {"type": "object"}
MAX_TRIED = 300  # parts of a schema, to find the one that the library refuses


@dataclass(frozen=True)
class EnforcedSchema:
    """A schema for the grammar library."""

    schema: dict[str, Any]  # it has only keywords that the library follows
    warnings: tuple[str, ...]  # what of the client's schema is not enforced
    open_objects: bool  # whether some object may have properties without a name, so that keys could repeat


def enforced_schema(schema: Mapping[str, Any], strict: bool, *, objects: bool = False) -> EnforcedSchema:
    """A schema whose instances all satisfy `schema`, and are objects if only `objects` are wanted.

    Raises:
        InvalidRequest: the schema is strict, and no such schema is known. Names the keyword and its JSON pointer.
    """
    report = Report(strict)
    try:
        return _Rewriter(schema, report).run(objects)
    except (InvalidRequest, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "#: references lead too deep into the schema: make it flatter" if deep else str(error)
        if strict:
            raise InvalidRequest(why) from None
        report.warn(f"the schema is not enforced, any JSON object is: {why}")
        return EnforcedSchema(ANY_OBJECT, tuple(report.warnings), True)


class _Wrong(Exception):
    """Why a keyword cannot be enforced."""


class _Rewriter:
    def __init__(self, schema: Mapping[str, Any], report: Report) -> None:
        check_depth(schema)
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
            raise InvalidRequest(f"#: the schema has more than {MAX_SCHEMA_CHARACTERS:,} characters")
        self._root, self._report = schema, report
        draft = str(schema.get("$schema"))
        self._tuple_keyword = "items" if "draft-0" in draft or "2019-09" in draft else "prefixItems"
        if "draft-03" in draft:
            report.unenforced("", "$schema", "draft 3 is not supported", "is read as draft 4")
        self._open = False
        self._names: dict[tuple[str, bool], str] = {}
        self._definitions: dict[str, Any] = {}
        self._written: list[tuple[str, Any, dict[str, Any]]] = []  # a path, the client's schema, ours; inner ones first

    def run(self, objects: bool) -> EnforcedSchema:
        root = self._schema(self._root, "", alone=True)
        root = root if isinstance(root, dict) else {} if root else {"enum": []}
        if objects and root.get("type") != "object":
            root = {"allOf": [root, ANY_OBJECT]}
        ending: set[str] = set()
        while more := {name for name, one in self._definitions.items() if name not in ending and _ends(one, ending)}:
            ending |= more
        self._definitions |= dict.fromkeys(self._definitions.keys() - ending, False)  # without a finite instance
        if why := self._refusal(root):
            raise InvalidRequest(self._blame(why))
        return EnforcedSchema(self._document(root), tuple(self._report.warnings), self._open)

    def _document(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _refusal(self, schema: dict[str, Any]) -> str:
        return refusal(self._document(schema))

    def _schema(self, schema: Any, path: str, *, alone: bool) -> Any:
        """Rewrite a schema. `alone`: no other schema says what may be in its place."""
        if isinstance(schema, bool):
            self._open |= schema
            return schema
        if not isinstance(schema, dict):
            parent, _, key = path.rpartition("/")
            self._report.unenforced(parent, key, "this is no schema")
            return True
        if schema.get("not") == {}:
            return False
        if self._tuple_keyword == "items" and "$ref" in schema and "2019-09" not in str(self._root["$schema"]):
            schema = {"$ref": schema["$ref"]}  # validators ignore its siblings in these drafts
        applied = [key for key in APPLICATORS if key in schema]
        joined = len(applied) + any(key in SPEAKS_OF for key in schema)
        joined += len(schema["allOf"]) - 1 if isinstance(schema.get("allOf"), list) else 0
        written, numbers = dict[str, Any](), dict[str, Any]()
        for keyword, value in schema.items():
            try:
                for keywords, fits, why in VALUE_RULES:
                    if keyword in keywords and not fits(value):
                        raise _Wrong(why)
                if keyword == "multipleOf" and self._report.strict and not is_exact_step(value):
                    raise _Wrong("validators round: only whole numbers and binary fractions such as 0.25 are exact")
                if keyword in BOUNDS or keyword == "multipleOf":
                    numbers[keyword] = value
                else:
                    _add(written, self._keyword(schema, keyword, value, path, alone=alone and joined < 2))
            except _Wrong as wrong:
                self._report.unenforced(path, keyword, str(wrong))
        integers = "integer" in written.get("type", ()) and "number" not in written["type"]
        written |= number_rules(numbers, integers=integers) if numbers or integers else {}
        if alone and (joined > 1 or not applied):
            self._close(schema, written)
            types = written.get("type", TYPES if "enum" not in written else ())
            self._open |= joined > 1 or ("array" in types and "items" not in written)
            self._open |= "object" in types and written.get("additionalProperties") is not False
        self._written.append((path, schema, written))
        return written

    def _close(self, schema: dict[str, Any], written: dict[str, Any]) -> None:
        """Close objects, and say which types are generated, where no schema of the place does."""
        joined = list(self._joined(schema, set()))
        names: dict[str, dict[str, Any]] = {"properties": {}, "patternProperties": {}}
        described = any(names.keys() & one.keys() for one in joined)
        if described and not any("additionalProperties" in one for one in joined):
            for one in joined:
                listed = [*dict_or_empty(one.get("properties")), *filter(is_text, list_or_empty(one.get("required")))]
                names["properties"] |= dict.fromkeys(listed, True)
                for pattern in dict_or_empty(one.get("patternProperties")):
                    with contextlib.suppress(Untranslatable):
                        names["patternProperties"][translate(pattern)] = True
            for keyword, found in names.items():
                written |= {keyword: found | written.get(keyword, {})} if found else {}
            written["additionalProperties"] = False
        implied = sorted({SPEAKS_OF[key] for one in joined for key in one if key in SPEAKS_OF})
        if implied and not any({"type", "enum", "const"} & one.keys() for one in joined):
            written["type"] = implied

    def _joined(self, schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
        """The schemas of one place: those that hold together, and the options of each."""
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            target = resolve(self._root, schema.get("$ref"))
            options = [one for key in ("allOf", "anyOf", "oneOf") for one in list_or_empty(schema.get(key))]
            for one in [*([target[0]] if target else []), *options]:
                yield from self._joined(one, seen)

    def _keyword(self, schema: dict[str, Any], keyword: str, value: Any, path: str, *, alone: bool) -> dict[str, Any]:
        """What is written for a keyword. `alone`: other keywords of its schema do not matter. Raises _Wrong."""
        match keyword:
            case "type":
                names = value if isinstance(value, list) else [value]
                if not names or not all(name in TYPES for name in names):
                    raise _Wrong(f"there is no type {json.dumps(value):.40}")
                return {keyword: names if len(names) > 1 else names[0]}
            case "enum" | "const":
                values = [value] if keyword == "const" else value
                if not all(map(is_writable, values)):
                    why = "it has a control character or a number that a double does not hold"
                    self._report.unenforced(path, keyword, why, "is enforced without some values")
                return {"enum": [whole_numbers(one) for one in values if is_writable(one)]}
            case "$ref":
                return self._reference(value, path, alone=alone)
            case "allOf" | "anyOf" | "oneOf":
                tagged: dict[str, Any] = {}
                if keyword == "oneOf":
                    tag = dict_or_empty(schema.get("discriminator")).get("propertyName")  # of OpenAPI
                    tagged = {"required": [tag]} if is_text(tag) else {}
                    if not exclude_each_other(self._root, value, tag if tagged else None):
                        why = "its options may hold at once (give each a property with its own const, or write anyOf)"
                        self._report.unenforced(path, keyword, why, "is enforced as anyOf")
                options = [self._schema(one, pointer(path, keyword, n), alone=alone) for n, one in enumerate(value)]
                return tagged | {keyword.replace("one", "any"): options}
            case _ if keyword in COUNTS:
                if value > MAX_COUNTS.get(keyword, value):
                    raise _Wrong(f"more than {MAX_COUNTS[keyword]:,} is too large")
                required = filter(is_text, list_or_empty(schema.get("required")))
                optional = dict_or_empty(schema.get("properties")).keys() - set(required)
                if keyword.endswith("Properties") and optional:
                    raise _Wrong("beside optional properties it is not supported")
                return {keyword: int(value)} if value < 1 << 30 else {}
            case "pattern":
                return {keyword: self._regex(value)}
            case "format":
                if value in UNSUPPORTED_FORMATS:
                    raise _Wrong(f"the format {value!r:.40} is not supported")
                if value not in FORMATS:
                    self._report.warn(f"'format' at #{path[-200:]}: {value!r:.40} is not checked")
                return FORMATS.get(value, {})
            case "properties":
                return {keyword: {name: self._inner(one, path, keyword, name) for name, one in value.items()}}
            case "patternProperties":
                return {keyword: self._by_pattern(schema, value, path, alone=alone)}
            case "additionalProperties":
                return {keyword: self._inner(value, path, keyword)}
            case "required":
                return {keyword: value}
            case "propertyNames":
                return self._property_names(value, path)
            case "items" if isinstance(value, list):
                if self._tuple_keyword != keyword:
                    why = 'a list is for drafts before 2020-12: write prefixItems, or "$schema"'
                    self._report.unenforced(path, keyword, why, "is read as prefixItems")
                rest = self._inner(schema.get("additionalItems", True), path, "additionalItems")
                return {
                    "prefixItems": [self._inner(one, path, keyword, n) for n, one in enumerate(value)],
                    "items": rest,
                }
            case "items":
                return {keyword: self._inner(value, path, keyword)}
            case "prefixItems" if self._tuple_keyword == keyword:
                return {keyword: [self._inner(one, path, keyword, n) for n, one in enumerate(value)]}
            case "uniqueItems" if value and schema.get("maxItems", 2) not in (0, 1):
                raise _Wrong("items that differ cannot be guaranteed")
            case "$id" if path and is_text(value):
                raise _Wrong("only the whole schema may have an address")
            case _ if keyword in UNSUPPORTED:
                raise _Wrong("it cannot be guaranteed")
            case _ if keyword not in ANNOTATIONS and keyword not in SPEAKS_OF:
                self._report.warn(f"{keyword!r:.60} at #{path[-200:]} is not a keyword of JSON Schema, and is ignored")
            case _:
                pass
        return {}

    def _inner(self, schema: Any, path: str, *steps: str | int) -> Any:
        return self._schema(schema, pointer(path, *steps), alone=True)

    def _regex(self, pattern: str) -> str:
        try:
            written = translate(pattern)
        except Untranslatable as why:
            if self._report.strict or not why.foreign or refusal({"type": "string", "pattern": pattern}):
                raise _Wrong(str(why)) from None
            return pattern
        if why := refusal({"type": "string", "pattern": written}):
            raise _Wrong(f"it cannot be followed ({why:.80})")
        return written

    def _reference(self, reference: Any, path: str, *, alone: bool) -> dict[str, Any]:
        target = resolve(self._root, reference)
        if target is None:
            raise _Wrong("only references into the schema itself are followed")
        schema, where = target
        if where == path:
            raise _Wrong("it leads back to itself and to nothing else")
        if (where, alone) not in self._names:
            name = self._names[where, alone] = f"n{len(self._names)}"
            self._definitions[name] = None  # keeps the order of the names
            self._definitions[name] = self._schema(schema, where, alone=alone)
        return {"$ref": f"#/$defs/{self._names[where, alone]}"}

    def _by_pattern(self, schema: dict[str, Any], found: dict[str, Any], path: str, *, alone: bool) -> dict[str, Any]:
        written: dict[str, Any] = {}
        self._open = True
        for pattern, one in found.items():
            try:
                regex = translate(pattern)
            except Untranslatable as why:
                self._report.unenforced(pointer(path, "patternProperties"), pattern, str(why))
                continue
            if not is_endless(pattern):
                why = "a pattern with few names may run out of them"
                self._report.unenforced(path, "patternProperties", why, "is enforced, but keys may be there twice")
            if schema.get("additionalProperties", not alone) is not False and not is_exact(pattern):
                why = "this pattern is read in different ways, so additionalProperties must be false"
                self._report.unenforced(path, "patternProperties", why, "is enforced for a part of the names")
            written[regex] = self._inner(one, path, "patternProperties", pattern)
        if "not disjoint" in refusal({"patternProperties": dict.fromkeys(written, True)}):
            raise _Wrong("its patterns overlap")
        return written

    def _property_names(self, names: Any, path: str) -> dict[str, Any]:
        target = resolve(self._root, names.get("$ref")) if isinstance(names, dict) else None
        names = target[0] if target else names
        rules = {key: one for key, one in names.items() if key not in ANNOTATIONS} if isinstance(names, dict) else names
        if rules is True or rules in ({}, {"type": "string"}):
            return {}
        kind, closed = rules.keys() - {"type"} if isinstance(rules, dict) else set(), {"additionalProperties": False}
        if kind == {"enum"} and all(map(is_text, list_or_empty(rules["enum"]))):
            return {"allOf": [{"properties": dict.fromkeys(list_or_empty(rules["enum"]), True)} | closed]}
        if kind == {"pattern"} and is_text(rules["pattern"]) and rules.get("type", "string") == "string":
            found = self._by_pattern(closed, {rules["pattern"]: True}, path, alone=True)
            return {"allOf": [{"patternProperties": found} | closed]}
        raise _Wrong("only an enum or a pattern is supported")

    def _blame(self, why: str) -> str:
        """Which part of the schema the library refuses, and why."""
        failing = (one for one in self._written[:MAX_TRIED] if self._refusal(one[2]))
        path, schema, written = next(failing, ("", self._root, {}))
        why = self._refusal(written) or why
        keywords, where = ", ".join(map(repr, list(schema)[:8]))[:200], f"#{path[-200:]}"
        if self._definitions.get(written.get("$ref", "")[8:]) is False:
            return f"{where}: '$ref' leads back to itself in every instance, so none would end"
        if "nsatisfiable" in why:
            return f"{where}: nothing satisfies {keywords}"
        return f"{where}: {keywords} cannot be enforced: {why[:150]}"


def _add(written: dict[str, Any], rules: dict[str, Any]) -> None:
    """Add keywords to a schema; in a schema of their own where it has one of them."""
    if not written.keys() & rules.keys():
        written |= rules
    else:
        written["allOf"] = [*written.get("allOf", ()), *(rules["allOf"] if rules.keys() == {"allOf"} else [rules])]


def _ends(schema: Any, known: set[str]) -> bool:
    """Whether some instance of a written schema is finite. `known`: definitions that have one."""
    if not isinstance(schema, dict):
        return schema is not False
    needed = list(schema.get("allOf", ()))
    if schema.get("type", "object") == "object":
        needed += [schema.get("properties", {}).get(name, True) for name in schema.get("required", ())]
    if schema.get("type", "array") == "array":
        least = schema.get("minItems", 0)
        needed += [*schema.get("prefixItems", ()), *([schema.get("items", True)] * least)][:least]
    return (
        ("$ref" not in schema or schema["$ref"][8:] in known)
        and all(_ends(one, known) for one in needed)
        and ("anyOf" not in schema or any(_ends(one, known) for one in schema["anyOf"]))
    )
