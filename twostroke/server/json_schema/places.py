"""The places of a schema, read: what may be in each of them, and whether anything may."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLMatcher

from twostroke.errors import InvalidRequest
from twostroke.server.json_schema.alternatives import Alternatives
from twostroke.server.json_schema.conjunction import Conjunction, Reader, type_of
from twostroke.server.json_schema.exclusion import Exclusions
from twostroke.server.json_schema.numbers import EXACT
from twostroke.server.json_schema.patterns import Pattern
from twostroke.server.json_schema.references import Document, Part
from twostroke.server.json_schema.report import Report, TooLarge
from twostroke.server.json_schema.shapes import ArrayShape, Node, ObjectShape, Shape, has_instance, why_empty

MOST_NODES = 3000


class Places:
    """Reads a document into nodes. Places with the same schemas are one node, so recursion ends."""

    def __init__(self, document: Document, report: Report) -> None:
        self._report = report
        self._alternatives = Alternatives(document, report)
        self._reader = Reader(document.draft, report)
        self._exclusions = Exclusions(document, report)
        self._nodes: dict[tuple[str, ...], Node] = {}
        self._waiting: list[tuple[Node, tuple[Part, ...]]] = []

    def read(self, *parts: Part) -> Node:
        """The place where all of `parts` hold, with those below it. Raises InvalidRequest if nothing may be there."""
        root = self._node(parts)
        while self._waiting:
            node, below = self._waiting.pop()
            node.shapes = [self._shape(branch_parts) for branch_parts in self._conjunctions(below)]
        self._find_finite()
        if not root.finite:
            raise InvalidRequest(why_empty(root))
        return root

    def _node(self, parts: Sequence[Part]) -> Node:
        parts = tuple(part for part in parts if part.schema is not True and part.schema != {})
        key = tuple(dict.fromkeys(json.dumps(part.schema) for part in parts))
        if key not in self._nodes:
            if len(self._nodes) >= MOST_NODES:
                raise TooLarge(f"the schema has more than {MOST_NODES:,} parts once its references are followed")
            keywords = dict.fromkeys(word for part in parts if isinstance(part.schema, dict) for word in part.schema)
            self._nodes[key] = Node(parts[0].path if parts else "", tuple(keywords))
            self._waiting.append((self._nodes[key], parts))
        self._nodes[key].uses += 1
        return self._nodes[key]

    def _conjunctions(self, parts: tuple[Part, ...]) -> Iterable[Conjunction]:
        for branch in self._alternatives.of(parts):
            found = self._reader.join(branch.parts)
            self._exclusions.enforce(found, branch.excluded)
            yield found

    def _shape(self, found: Conjunction) -> Shape:
        types = found.spoken_types()
        if found == Conjunction():
            return Shape(anything=True)
        if found.values is not None:
            return Shape(plain=self._values(found))
        shape = Shape(plain=[{"type": name} for name in ("boolean", "null") if name in types])
        if "string" in types and (text := self._text(found)) is not None:
            shape.plain.append(text)
        number = found.numbers.fractions() if "fraction" in types else None
        if number is None and "integer" in types and not found.numbers.empty:
            number = found.numbers.integers()
        if number is not None:
            shape.plain.append(number)
        if "array" in types:
            shape.array = self._array(found)
        if "object" in types:
            shape.object = self._object(found)
        return shape

    def _values(self, found: Conjunction) -> list[dict[str, Any]]:
        path, keyword = found.values_from
        kept: list[Any] = []
        for value in found.values or []:
            type_ = type_of(value)
            if type_ in ("integer", "fraction") and not found.numbers.holds(value):
                continue
            if type_ == "string" and not found.holds_text(value):
                continue
            if (type_ == "array" and "array" in found.implied) or (type_ == "object" and "object" in found.implied):
                self._report.skip(path, keyword, "beside keywords for the inside of its values it is not supported")
            if not _writable(value):
                self._report.skip(path, keyword, "it has a control character or a number that a double does not hold")
                continue
            kept.append(value)
        return [{"enum": kept}] if kept else []

    def _text(self, found: Conjunction) -> dict[str, Any] | None:
        least, most = found.counts.get("minLength", 0), found.counts.get("maxLength")
        if most is not None and least > most:
            return None
        schema: dict[str, Any] = {"type": "string"} | ({"minLength": least} if least else {})
        schema |= {"maxLength": most} if most is not None else {}
        written = [f"^{one.regex}$" if isinstance(one, Pattern) else one for one in found.patterns]
        if written:
            schema["pattern"] = written[0]
        if len(written) > 1:
            schema = {"allOf": [schema, *({"type": "string", "pattern": one} for one in written[1:])]}
        return schema if not written or _compiles(json.dumps(schema)) else None

    def _array(self, found: Conjunction) -> ArrayShape:
        length = max((len(items.first) for items in found.items), default=0)

        def at(place: int) -> Node:
            parts = [items.first[place] if place < len(items.first) else items.rest for items in found.items]
            return self._node([part for part in parts if part is not None])

        first = [at(place) for place in range(length)]
        return ArrayShape(first, at(length), found.counts.get("minItems", 0), found.counts.get("maxItems"))

    def _object(self, found: Conjunction) -> ObjectShape:
        others = found.others()
        named = {name: found.property_parts(name) for name in found.property_names()}
        patterns = [
            (pattern, part, [p.others for p in found.properties if p is not one and p.others is not None])
            for one in found.properties
            for pattern, part in one.patterns
        ]
        allowed: list[tuple[Pattern, list[Part]]] = [(pattern, [part, *more]) for pattern, part, more in patterns]
        rest: list[Part] | None = others if found.open else None
        for names in found.names:
            rest = self._limit_names(names, named, allowed, rest)
        for pattern, parts in allowed:
            where = parts[0].path.rpartition("/")[0].rpartition("/")[0] if parts else ""
            if not pattern.endless:
                self._report.skip(where, "patternProperties", "a pattern with few names may run out of them")
            elif rest is not None and not pattern.exact and all(part.schema is not False for part in rest):
                why = "this pattern is read in different ways, so additionalProperties must be false"
                self._report.skip(where, "patternProperties", why)
        if len(allowed) > 1 and not _distinct(pattern for pattern, _ in allowed):
            self._report.skip(found.path, "patternProperties", "its patterns overlap")
            allowed = allowed[:1]
        return ObjectShape(
            {name: self._node(parts) for name, parts in named.items()},
            set(found.required),
            [(f"^{pattern.regex}$", self._node(parts)) for pattern, parts in allowed],
            None if rest is None else self._node(rest),
            found.counts.get("minProperties", 0),
            found.counts.get("maxProperties"),
            found.path,
        )

    def _limit_names(
        self,
        names: Part,
        named: dict[str, list[Part]],
        patterns: list[tuple[Pattern, list[Part]]],
        rest: list[Part] | None,
    ) -> list[Part] | None:
        """Apply `propertyNames`. Gives back what holds for properties without a name now, None if there are none."""
        found = list(self._conjunctions((names,)))
        texts = [one for one in found if "string" in one.types]
        for name in named:
            if not any(one.holds_text(name) for one in texts):
                named[name] = [Part(False, names.path)]
        if rest is None and not patterns:
            return None
        if any(one.values is None and not one.patterns and not one.counts for one in texts):
            return rest
        if texts and all(one.values is not None for one in texts) and not patterns:
            for one in texts:
                for value in one.values or []:
                    if isinstance(value, str) and one.holds_text(value):
                        named.setdefault(value, rest or [])
            return None
        one = texts[0] if len(texts) == 1 else Conjunction()
        if not patterns and len(one.patterns) == 1 and isinstance(one.patterns[0], Pattern) and not one.counts:
            patterns.append((one.patterns[0], rest or []))
            return None
        self._report.skip(names.path.rpartition("/")[0], "propertyNames", "only an enum or a pattern is supported")
        return rest

    def _find_finite(self) -> None:
        changed = True
        while changed:
            changed = False
            for node in self._nodes.values():
                if not node.finite and any(has_instance(shape) for shape in node.shapes):
                    node.finite = changed = True


def _distinct(patterns: Iterable[Pattern]) -> bool:
    """Whether no name has two of some patterns."""
    options = {f"^{pattern.regex}$": {} for pattern in patterns}
    return _compiles(json.dumps({"type": "object", "patternProperties": options}))


@functools.lru_cache(1024)
def _compiles(schema: str) -> bool:
    """Whether the grammar library finds instances of a schema."""
    failed, _ = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
    return not failed


def _writable(value: Any) -> bool:
    if isinstance(value, str):
        return all(sign >= " " or sign in "\b\t\n\f\r" for sign in value) and not any(
            sign == "\x7f" or "\ud800" <= sign < "\ue000" for sign in value
        )
    if isinstance(value, dict):
        return all(_writable(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(_writable, value))
    return not isinstance(value, int | float) or abs(value) <= EXACT
