"""The keywords of JSON Schema: what their values must be, and of which type of a value they speak."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from twostroke.server.json_schema.numbers import BOUNDS, EXACT

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
SPEAKS_OF = {  # a type
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys((*BOUNDS, "multipleOf"), "number"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), "object"),
    **dict.fromkeys(("propertyNames", "minProperties", "maxProperties"), "object"),
}
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
ANNOTATIONS = {  # and what is read with another keyword, or says nothing without it
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
    *("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$defs", "definitions"),
    *("contentEncoding", "contentMediaType", "contentSchema", "then", "else", "discriminator"),
    *("minContains", "maxContains"),
}
UNSUPPORTED = {
    *("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems"),
    *("unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def is_writable(value: Any) -> bool:
    if isinstance(value, str):
        return not any(
            (sign < " " and sign not in "\b\t\n\f\r") or sign == "\x7f" or "\ud800" <= sign < "\ue000" for sign in value
        )
    if isinstance(value, list | dict):
        return all(map(is_writable, value if isinstance(value, list) else [*value.keys(), *value.values()]))
    return not isinstance(value, int | float) or abs(value) <= EXACT


VALUE_RULES: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (  # what a keyword's value must be
    (("pattern", "format"), is_text, "it is a text"),
    (("properties", "patternProperties"), lambda value: isinstance(value, dict), "it is an object"),
    (("allOf", "anyOf", "oneOf", "prefixItems"), lambda value: bool(list_or_empty(value)), "it is a list of schemas"),
    (("enum",), lambda value: isinstance(value, list), "it is a list of values"),
    (("required",), lambda value: isinstance(value, list) and all(map(is_text, value)), "it is a list of names"),
    ((*BOUNDS, "multipleOf"), is_number, "it is a number, and a double holds it"),
    (("multipleOf",), lambda value: value > 0, "it is more than 0"),
    (COUNTS, lambda value: is_number(value) and value >= 0 and value == int(value), "it is a whole number, 0 or more"),
)
