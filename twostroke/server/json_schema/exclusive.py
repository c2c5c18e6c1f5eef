"""Whether at most one of several schemas holds, as `oneOf` demands: by a type, a value, or a tag that differs.

That is what libraries write. Anything finer counts as not proved.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any

from twostroke.server.json_schema.document import resolve
from twostroke.server.json_schema.keywords import TYPES, dict_or_empty, is_text, list_or_empty

MAX_OPTIONS = 64  # each is compared with each
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def exclude_each_other(root: Mapping[str, Any], options: Sequence[Any], tag: str | None) -> bool:
    """Whether no value satisfies two of the options. `root`: the whole schema. `tag`: a property that all require."""
    found = list(islice(_flat(root, options), MAX_OPTIONS + 1))
    return len(found) <= MAX_OPTIONS and all(_apart(root, one, two, tag) for one, two in combinations(found, 2))


def _flat(root: Mapping[str, Any], options: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The options, and in place of a reference or a union what it leads to, which allows no less."""
    for option in map(dict_or_empty, options):
        target = resolve(root, option.get("$ref"))
        inner = [target[0]] if target else list_or_empty(option.get("oneOf")) or list_or_empty(option.get("anyOf"))
        yield from _flat(root, inner) if inner else (option,)


def _apart(root: Mapping[str, Any], one: dict[str, Any], two: dict[str, Any], tag: str | None) -> bool:
    if not _overlap(root, one, two):
        return True
    required = [{tag, *filter(is_text, list_or_empty(option.get("required")))} for option in (one, two)]
    first, second = (dict_or_empty(option.get("properties")) for option in (one, two))
    tags = first.keys() & second.keys() & required[0] & required[1]
    return "object" in (one.get("type"), two.get("type")) and any(
        not _overlap(root, first[name], second[name]) for name in tags
    )


def _overlap(root: Mapping[str, Any], one: Any, two: Any) -> bool:
    """Whether two schemas have a type in common, and a value if both list theirs."""
    (types, values), (others, listed) = _scalars(root, one), _scalars(root, two)
    return bool(types & others) and (values is None or listed is None or bool(values & listed))


def _scalars(root: Mapping[str, Any], schema: Any) -> tuple[set[str], set[str] | None]:
    """The types that a schema allows, and its values, as JSON, where it lists them."""
    target = resolve(root, dict_or_empty(schema).get("$ref"))  # old drafts ignore what is beside it
    schema = dict_or_empty(target[0] if target else schema)
    types = schema.get("type", [*TYPES])
    allowed = {*filter(is_text, types if isinstance(types, list) else [types])}
    allowed |= {"integer"} if "number" in allowed else set()
    if not {"const", "enum"} & schema.keys():
        return allowed, None
    values = whole_numbers([schema["const"]] if "const" in schema else list_or_empty(schema["enum"]))
    allowed &= {_TYPE_OF.get(type(one), "null") for one in values}
    return allowed, {json.dumps(one, sort_keys=True) for one in values}


def whole_numbers(value: Any) -> Any:
    """A JSON value with whole numbers as integers: 1 and 1.0 are the same to validators, and not to the library."""
    if isinstance(value, list):
        return [whole_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: whole_numbers(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
