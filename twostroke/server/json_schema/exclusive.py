"""Whether at most one of several schemas holds, as `oneOf` demands."""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from twostroke.server.json_schema.document import resolve
from twostroke.server.json_schema.keywords import APPLICATORS, SPEAKS_OF, is_text, list_or_empty
from twostroke.server.json_schema.patterns import refusal

MAX_OPTIONS = 64
# What all pairs of a `oneOf` may cost, or they count as not proved: a limit of work and not of time, so that a schema
# is always answered alike. Both take about a second.
MAX_COMBINATIONS = 10_000  # of alternatives: the library looks at each with each
MAX_CHARACTERS = 10_000_000  # of schemas: definitions are read again for each pair
_SAFE = (  # keywords that the library reads as validators do
    *("type", "enum", "const", "required", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems"),
)


def exclude_each_other(root: Mapping[str, Any], base: dict[str, Any], options: Sequence[Any], *, closed: bool) -> bool:
    """Whether the grammar library proves of each two options that no value satisfies both.

    Args:
        root: the whole schema.
        base: what holds besides.
        options: the schemas of a `oneOf`.
        closed: whether objects are generated without properties that their option does not name.
    """
    definitions = {key: outline(root[key], named=True) for key in ("$defs", "definitions") if key in root}

    counts, size = [alternatives(outline(one)) for one in options], len(json.dumps([definitions, base, *options]))
    pairs = list(combinations(range(len(options)), 2))
    combined = sum(counts[one] * counts[two] for one, two in pairs)
    if len(options) > MAX_OPTIONS or combined > MAX_COMBINATIONS or len(pairs) * size > MAX_CHARACTERS:
        return False

    def apart(one: Any, two: Any) -> bool:
        both = {**definitions, "allOf": [outline(base), outline(one), outline(two)]}
        return refusal(json.dumps(both)).startswith("Unsatisfiable schema")

    def as_generated(one: Any) -> Any:
        if isinstance(one, dict) and not one.keys() & {*SPEAKS_OF, "allOf", "anyOf", "oneOf"}:
            one = (resolve(root, one.get("$ref")) or (one,))[0]
        named = one.get("properties") if isinstance(one, dict) and not set(APPLICATORS) & one.keys() else None
        if not closed or not isinstance(named, dict):
            return one
        required = filter(is_text, list_or_empty(one.get("required")))
        return {"additionalProperties": False, **one, "properties": dict.fromkeys(required, True) | named}

    return all(
        apart(one, two) or (apart(as_generated(one), two) and apart(one, as_generated(two)))
        for one, two in combinations(options, 2)
    )


def alternatives(schema: Any) -> int:
    """The number of conjunctions that a schema's unions stand for, which is what comparing it costs."""
    if isinstance(schema, list):
        return prod(alternatives(one) for one in schema)
    if not isinstance(schema, dict):
        return 1
    unions = [sum(alternatives(one) for one in schema[key]) for key in ("anyOf", "oneOf") if key in schema]
    others = [alternatives(one) for key, one in schema.items() if key not in ("anyOf", "oneOf", "enum", "const")]
    return prod([*unions, *others])


def outline(schema: Any, *, named: bool = False) -> Any:
    """A schema that all instances of a schema satisfy, in keywords that the grammar library reads as validators do.

    `named`: these are schemas by name.
    """
    if named and isinstance(schema, dict):
        return {name: outline(one) for name, one in schema.items()}
    if not isinstance(schema, dict):
        return schema is not False
    if schema.get("not") == {}:
        return False
    if "$ref" in schema:  # old drafts ignore its siblings
        return {"$ref": schema["$ref"]} if str(schema["$ref"]).startswith(("#/$defs/", "#/definitions/")) else True
    found = {key: whole_numbers(schema[key]) for key in _SAFE if key in schema}
    if "properties" in schema:
        found["properties"] = outline(schema["properties"], named=True)
    if "additionalProperties" in schema and "patternProperties" not in schema:
        found["additionalProperties"] = outline(schema["additionalProperties"])
    for key in ("allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            options = [outline(one) for one in schema[key]]
            found.setdefault("allOf", []).append({key.replace("one", "any"): options})
    return found


def whole_numbers(value: Any) -> Any:
    """A JSON value with whole numbers as integers: 1 and 1.0 are the same to validators, and not to the library."""
    if isinstance(value, list):
        return [whole_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: whole_numbers(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
