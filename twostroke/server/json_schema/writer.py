"""The schema for the grammar library: few keywords, each with a meaning that is known."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.server.json_schema.places import Places
from twostroke.server.json_schema.references import Document, Part
from twostroke.server.json_schema.report import Report, TooLarge
from twostroke.server.json_schema.shapes import (
    ArrayShape,
    Node,
    ObjectShape,
    array_has_instance,
    object_has_instance,
)

MOST_BYTES = 250_000
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Guaranteed:
    """A schema that the grammar library follows."""

    schema: dict[str, Any]
    warnings: tuple[str, ...]  # what of the client's schema is not enforced
    open_objects: bool  # some object may have properties that the schema does not name


def guaranteed(schema: Mapping[str, Any], strict: bool, *, objects: bool = False) -> Guaranteed:
    """A schema whose instances all satisfy `schema`, and are objects if only `objects` are wanted.

    Raises:
        InvalidRequest: the schema is strict, and no such schema is known. Names the keyword and its JSON pointer.
    """
    report = Report(strict)
    try:
        if len(json.dumps(schema)) > MOST_BYTES:
            raise TooLarge(f"the schema has more than {MOST_BYTES:,} characters")
        document, writer = Document(schema, report), Writer(report)
        root = Places(document, report).read(document.root, *([Part(ANY_OBJECT, "")] if objects else []))
        return Guaranteed(writer.write(root), tuple(report.warnings), writer.open_objects)
    except (InvalidRequest, RecursionError) as error:
        why = str(error) or "the schema is nested too deeply"
        if strict:
            raise InvalidRequest(why) from None
        report.warn(f"the schema is not enforced, any JSON object is: {why}")
        return Guaranteed(ANY_OBJECT, tuple(report.warnings), True)


class Writer:
    """Writes nodes that are read. A node that several places share is written once, as a definition.

    Attributes:
        open_objects: whether some object may have properties that the schema does not name.
    """

    def __init__(self, report: Report) -> None:
        self.open_objects = False
        self._report = report
        self._definitions: dict[str, Any] = {}
        self._names: dict[Node, str] = {}

    def write(self, root: Node) -> dict[str, Any]:
        """The whole schema."""
        written = self._write(root)
        return {**written, "$defs": self._definitions} if self._definitions else written

    def _write(self, node: Node) -> dict[str, Any]:
        if node in self._names:
            return {"$ref": f"#/$defs/{self._names[node]}"}
        shared = node.uses > 1 and any(shape.array or shape.object for shape in node.shapes)
        if not shared:
            return self._options(node)
        name = self._names[node] = f"n{len(self._names)}"
        self._definitions[name] = None  # keeps the order of the names
        self._definitions[name] = self._options(node)
        return {"$ref": f"#/$defs/{name}"}

    def _options(self, node: Node) -> dict[str, Any]:
        if any(shape.anything for shape in node.shapes):
            self.open_objects = True
            return {}
        options: list[dict[str, Any]] = []
        for shape in node.shapes:
            options += shape.plain
            if shape.array is not None and array_has_instance(shape.array):
                options.append(self._write_array(shape.array))
            if shape.object is not None and object_has_instance(shape.object):
                options.append(self._write_object(shape.object))
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _write_array(self, shape: ArrayShape) -> dict[str, Any]:
        first, most = shape.first, shape.most
        for place, node in enumerate(first):
            if not node.finite:
                first, most = first[:place], min(place, place if most is None else most)
                break
        if not shape.rest.finite:
            most = min(len(first), len(first) if most is None else most)
        first = first if most is None else first[:most]
        schema: dict[str, Any] = {"type": "array"}
        if first:
            schema["prefixItems"] = [self._write(node) for node in first]
        schema["items"] = self._write(shape.rest) if most is None or most > len(first) else False
        schema |= {"minItems": shape.least} if shape.least else {}
        return schema | ({"maxItems": most} if most is not None else {})

    def _write_object(self, shape: ObjectShape) -> dict[str, Any]:
        possible = {name: node for name, node in shape.named.items() if node.finite}
        required = [name for name in shape.named if name in shape.required]
        others = shape.others if shape.others is not None and shape.others.finite else None
        patterns = shape.patterns if others is not None or any(node.finite for _, node in shape.patterns) else []
        least, most = max(shape.least, len(required)), shape.most
        counted = bool(patterns) or others is not None
        if not counted and least == len(possible):
            required = list(possible)
        if most is not None and most == len(required):
            possible, patterns, others = {name: possible[name] for name in required}, [], None
        schema: dict[str, Any] = {"type": "object"}
        if least > len(required):
            if len(required) < len(possible) and (least > 1 or counted):
                self._report.skip(shape.path, "minProperties", "beside optional properties it is not supported")
            else:
                schema["minProperties"] = least
        if most is not None and most > len(required) and (patterns or others is not None or most < len(possible)):
            if len(required) < len(possible) and (most > 1 or counted):
                self._report.skip(shape.path, "maxProperties", "beside optional properties it is not supported")
            else:
                schema["maxProperties"] = most
        self.open_objects |= bool(patterns) or others is not None
        forbidden = {name: False for name, node in shape.named.items() if not node.finite} if counted else {}
        written = {name: self._write(node) for name, node in possible.items()} | forbidden
        schema |= {"properties": written} if written else {}
        if patterns:
            schema["patternProperties"] = {
                pattern: self._write(node) if node.finite else False for pattern, node in patterns
            }
        schema["additionalProperties"] = False if others is None else self._write(others)
        return schema | ({"required": required} if required else {})
