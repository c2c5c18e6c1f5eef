"""Whether a conjunction and a schema have no instance in common, as `oneOf`, `not` and `if` need.

What is proven here holds for all texts. Where nothing is proven, the keyword cannot be guaranteed.
"""

from collections.abc import Sequence
from typing import Any

from twostroke.server.json_schema.alternatives import Alternatives, Exclusion
from twostroke.server.json_schema.conjunction import Conjunction, Reader, same, type_of
from twostroke.server.json_schema.patterns import Pattern
from twostroke.server.json_schema.references import Document, Part
from twostroke.server.json_schema.report import Report

DEEPEST = 4
_WHY = {
    "oneOf": "its options may hold at once (give each a property with its own const, or write anyOf)",
    "not": "it cannot be guaranteed",
    "if": "its opposite cannot be guaranteed",
}


class Exclusions:
    """Enforces what must not hold, or reports that it cannot be."""

    def __init__(self, document: Document, report: Report) -> None:
        self._report = report
        ignored = Report(strict=False)  # skipping a keyword here only makes fewer things provable
        self._alternatives = Alternatives(document, ignored, circles=report)
        self._reader = Reader(document.draft, ignored)

    def enforce(self, found: Conjunction, excluded: Sequence[Exclusion]) -> None:
        """Remove from a conjunction what must not hold."""
        types = found.spoken_types()
        if excluded and types <= {"boolean", "null"} and found.values is None:
            found.values = [value for value in (True, False, None) if type_of(value) in types]
        for one in excluded:
            others = self._join(one.part)
            if found.values is not None:
                found.values = [value for value in found.values if self._value_apart(value, others, 0)]
                continue
            kept: set[str] = set()
            for type_ in found.spoken_types():
                if all(self._apart(found, type_, other, 0) for other in others):
                    kept.add(type_)
                elif not any(_all_of(type_, other) for other in others):
                    self._report.skip(one.path, one.keyword, _WHY[one.keyword])
                    kept.add(type_)
            if "fraction" in kept and "integer" not in kept and "integer" in found.types:
                kept.discard("fraction")  # a number that is no integer cannot be written
                if not kept:
                    self._report.skip(one.path, one.keyword, _WHY[one.keyword])
                    kept = {"integer", "fraction"}
            found.types = kept

    def _join(self, *parts: Part) -> list[Conjunction]:
        return [self._reader.join(branch.parts) for branch in self._alternatives.of(parts)]

    def _apart(self, found: Conjunction, type_: str, other: Conjunction, depth: int) -> bool:
        """Whether no value of a type satisfies both."""
        if type_ not in other.types or type_ not in found.types:
            return True
        if found.values is not None:
            mine = [value for value in found.values if type_of(value) == type_]
            return all(self._value_apart(value, [other], depth) for value in mine)
        if other.values is not None:
            theirs = [value for value in other.values if type_of(value) == type_]
            return all(self._value_apart(value, [found], depth) for value in theirs)
        match type_:
            case "integer" | "fraction":
                return found.numbers.apart(other.numbers)
            case "string":
                return _counts_apart(found, other, "Length")
            case "array":
                return _counts_apart(found, other, "Items")
            case "object":
                return self._objects_apart(found, other, depth)
            case _:
                return False

    def _objects_apart(self, found: Conjunction, other: Conjunction, depth: int) -> bool:
        if depth > DEEPEST:
            return False
        named = found.property_names()
        if not found.open and any(name not in named for name in other.required) and not _has_patterns(found):
            return True
        for name in dict.fromkeys([*found.required, *other.required]):
            mine, theirs = self._join(*found.property_parts(name)), self._join(*_certain(other, name))
            if all(self._all_apart(one, two, depth + 1) for one in mine for two in theirs):
                return True
        return False

    def _all_apart(self, one: Conjunction, two: Conjunction, depth: int) -> bool:
        return all(self._apart(one, type_, two, depth) for type_ in one.types)

    def _value_apart(self, value: Any, others: Sequence[Conjunction], depth: int) -> bool:
        return all(self._fails(value, other, depth) for other in others)

    def _fails(self, value: Any, other: Conjunction, depth: int) -> bool:
        """Whether a value certainly fails a conjunction."""
        type_ = type_of(value)
        if type_ not in other.types or depth > DEEPEST:
            return type_ not in other.types
        if other.values is not None and not any(same(value, one) for one in other.values):
            return True
        if type_ in ("integer", "fraction"):
            return not other.numbers.holds(value)
        if type_ == "string":
            low, high = other.counts.get("minLength", 0), other.counts.get("maxLength", len(value))
            exact = [pattern for pattern in other.patterns if isinstance(pattern, Pattern) and pattern.exact]
            return not low <= len(value) <= high or not all(pattern.matches(value) for pattern in exact)
        if type_ == "array":
            return not other.counts.get("minItems", 0) <= len(value) <= other.counts.get("maxItems", len(value))
        if type_ == "object":
            return any(name not in value for name in other.required) or any(
                self._value_apart(one, self._join(*_certain(other, name)), depth + 1) for name, one in value.items()
            )
        return False


def _all_of(type_: str, other: Conjunction) -> bool:
    """Whether a conjunction holds for every value of a type, since it says nothing but types."""
    return type_ in other.types and not other.implied and other.values is None and not other.names


def _counts_apart(found: Conjunction, other: Conjunction, what: str) -> bool:
    lows = [one.counts.get(f"min{what}", 0) for one in (found, other)]
    highs = [one.counts[f"max{what}"] for one in (found, other) if f"max{what}" in one.counts]
    return bool(highs) and max(lows) > min(highs)


def _has_patterns(found: Conjunction) -> bool:
    return any(properties.patterns for properties in found.properties)


def _certain(other: Conjunction, name: str) -> list[Part]:
    """What certainly holds for a property of an object that satisfies a conjunction."""
    found: list[Part] = []
    for properties in other.properties:
        if name in properties.named:
            found.append(properties.named[name])
        elif properties.others is not None and not properties.patterns:
            found.append(properties.others)
    return found
