"""Schemas as lists of conjunctions.

`$ref`, `allOf`, `anyOf`, `oneOf`, `if`, `not` and dependencies become alternatives, each a conjunction of schemas
without these keywords, and of schemas that must not hold.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.server.json_schema.references import Document, Part
from twostroke.server.json_schema.report import Report, TooLarge, pointer

MOST = 512  # alternatives of one place
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_JOINING = {*_REFERENCES, "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
_DEPENDING = {"dependentRequired", "dependentSchemas", "dependencies"}
_NOT_PLAIN = _JOINING | _DEPENDING | {"unevaluatedProperties"}


@dataclass(frozen=True)
class Exclusion:
    """A schema that must not hold, and the keyword that says so."""

    part: Part
    path: str
    keyword: str


@dataclass(frozen=True)
class Branch:
    """One alternative."""

    parts: tuple[Part, ...] = ()  # without the keywords that this file reads
    excluded: tuple[Exclusion, ...] = ()

    def __add__(self, other: "Branch") -> "Branch":
        return Branch(self.parts + other.parts, self.excluded + other.excluded)


Branches = list[Branch]


class Alternatives:
    """Finds the alternatives of schemas in one document."""

    def __init__(self, document: Document, report: Report, circles: Report | None = None) -> None:
        """`circles`: hears of references that no validator can follow; `report` if left out."""
        self._document, self._report, self._circles = document, report, circles or report

    def of(self, parts: Sequence[Part]) -> Branches:
        """The alternatives of a conjunction of schemas."""
        alone = len(parts) == 1
        return self._all(self._branches(part, (), alone) for part in parts)

    def _all(self, groups: Iterable[Branches]) -> Branches:
        """Every way to take one alternative of each group."""
        found = [Branch()]
        for group in groups:
            if len(found) * len(group) > MOST:
                raise TooLarge(f"the schema has more than {MOST} alternatives in one place: make it simpler")
            found = [first + second for first in found for second in group]
        return found

    def _branches(self, part: Part, following: tuple[str, ...], outer: bool = False) -> Branches:
        """`following`: the references that led here. `outer`: no other schema constrains the same value."""
        schema, path = part.schema, part.path
        if isinstance(schema, bool):
            return [Branch()] if schema else []
        if not isinstance(schema, dict):
            parent, _, key = path.rpartition("/")
            self._report.skip(parent, key, "this is no schema")
            return [Branch()]
        if "$ref" in schema and self._document.draft <= 7:  # its siblings are ignored there
            return self._reference(part, "$ref", following, outer)
        plain = {key: value for key, value in schema.items() if key not in _NOT_PLAIN}
        groups = [[Branch((Part(plain, path),))]]
        if "unevaluatedProperties" in schema:
            if outer:
                rest = {"unevaluatedProperties": schema["unevaluatedProperties"]}
                groups.append([Branch((Part(rest, path),))])
            else:
                self._report.skip(path, "unevaluatedProperties", "it is read in schemas that stand alone")
        for key in schema:
            if key in _REFERENCES:
                groups.append(self._reference(part, key, following))
            elif key in ("allOf", "anyOf", "oneOf"):
                groups.append(self._several(part, key, following))
            elif key == "not":
                groups.append(self._negation(part.at(key), path, key))
            elif key == "if":
                groups.append(self._condition(part, following))
            elif key in _DEPENDING:
                groups += self._dependencies(part, key, following)
        return self._all(groups)

    def _reference(self, part: Part, key: str, following: tuple[str, ...], outer: bool = False) -> Branches:
        target = self._document.resolve(part.schema[key]) if key == "$ref" else None
        if target is None:
            self._report.skip(part.path, key, "only references into the schema itself are followed")
        elif target.path in following or target.path == part.path:
            self._circles.skip(part.path, key, "it leads back to itself and to nothing else")
        else:
            return self._branches(target, (*following, target.path), outer)
        return [Branch()]

    def _several(self, part: Part, key: str, following: tuple[str, ...]) -> Branches:
        options = part.schema[key]
        if not isinstance(options, list) or not options:
            self._report.skip(part.path, key, "it is a list of schemas")
            return [Branch()]
        parts = [part.at(key, place) for place in range(len(options))]
        found = [self._branches(option, following) for option in parts]
        if key == "allOf":
            return self._all(found)
        if key == "oneOf":
            for place, group in enumerate(found):
                others = tuple(Exclusion(one, part.path, key) for one in parts if one is not parts[place])
                found[place] = [Branch(branch.parts, branch.excluded + others) for branch in group]
        return [branch for group in found for branch in group]

    def _negation(self, part: Part, path: str, keyword: str) -> Branches:
        """The alternatives of a schema's opposite: by its properties where it has nothing else."""
        schema = part.schema
        if schema in (True, {}):
            return []
        if schema is False:
            return [Branch()]
        named: Any = schema.get("properties", {}) if isinstance(schema, dict) else None
        required: Any = schema.get("required", []) if isinstance(schema, dict) else None
        simple = (
            isinstance(schema, dict)
            and schema.keys() <= {"type", "properties", "required", "title", "description", "$comment"}
            and schema.get("type", "object") == "object"
            and isinstance(named, dict)
            and isinstance(required, list)
            and all(isinstance(name, str) for name in required)
            and (named or required)
        )
        if not simple:
            return [Branch((), (Exclusion(part, path, keyword),))]
        found: Branches = []
        for name in dict.fromkeys([*named, *required]):
            if name in required:
                found.append(_plain({"type": "object", "properties": {name: False}}, part.path))
            if name in named and named[name] is not True:
                opposite = {"type": "object", "properties": {name: {"not": named[name]}}, "required": [name]}
                found.append(_plain(opposite, part.path))
        if "type" not in schema:
            return found
        others = ["array", "string", "number", "boolean", "null"]
        return [*found, _plain({"type": others}, part.path)]

    def _condition(self, part: Part, following: tuple[str, ...]) -> Branches:
        schema = part.schema
        if "then" not in schema and "else" not in schema:
            return [Branch()]
        holds = [self._branches(part.at("if"), following)]
        fails = [self._negation(part.at("if"), part.path, "if")]
        if "then" in schema:
            holds.append(self._branches(part.at("then"), following))
        if "else" in schema:
            fails.append(self._branches(part.at("else"), following))
        return self._all(holds) + self._all(fails)

    def _dependencies(self, part: Part, key: str, following: tuple[str, ...]) -> list[Branches]:
        given = part.schema[key]
        if not isinstance(given, dict):
            self._report.skip(part.path, key, "it is an object")
            return []
        groups: list[Branches] = []
        for name, needed in given.items():
            present = _plain({"required": [name]}, part.path)
            absent = _plain({"properties": {name: False}}, part.path)
            if isinstance(needed, list) and all(isinstance(one, str) for one in needed):
                groups.append([_plain({"required": [name, *needed]}, part.path), absent])
            elif isinstance(needed, dict | bool):
                held = self._branches(part.at(key, name), following)
                groups.append([*(present + branch for branch in held), absent])
            else:
                self._report.skip(pointer(part.path, key), name, "it is a list of names or a schema")
        return groups


def _plain(schema: dict[str, Any], path: str) -> Branch:
    return Branch((Part(schema, path),))
