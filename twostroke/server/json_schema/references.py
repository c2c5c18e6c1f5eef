"""`$ref`, `$anchor`, and the draft that a schema is written in."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from twostroke.server.json_schema.report import Report, TooLarge, pointer

MOST_NESTED = 100
_DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
_NO_SCHEMAS = {"enum", "const", "default", "examples", "example"}  # their values are data


@dataclass(frozen=True)
class Part:
    """A schema as the client wrote it, and the JSON pointer to it."""

    schema: Any  # an object or a boolean
    path: str

    def at(self, *steps: str | int) -> "Part":
        """A schema within this one."""
        found = self.schema
        for step in steps:
            found = found[step]
        return Part(found, pointer(self.path, *steps))


class Document:
    """A whole schema."""

    def __init__(self, schema: Mapping[str, Any], report: Report) -> None:
        """Raises TooLarge for a schema that is nested too deeply."""
        self.root = Part(schema, "")
        self._anchors: dict[str, Part] = {}
        self.draft = self._read_draft(report)
        for part in self._objects():
            self._find_anchor(part)

    def resolve(self, reference: Any) -> Part | None:
        """The schema that a reference names, or None if it is not in this document."""
        if not isinstance(reference, str):
            return None
        address, _, fragment = reference.partition("#")
        if address and address != str(self.root.schema.get("$id", self.root.schema.get("id", ""))).rstrip("#"):
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment)
        found: Any = self.root.schema
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and re.fullmatch("[0-9]{1,6}", name) and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return Part(found, unquote(fragment)) if isinstance(found, dict | bool) else None

    def _read_draft(self, report: Report) -> int:
        named = self.root.schema.get("$schema", "2020-12")
        draft = next((draft for name, draft in _DRAFTS.items() if name in str(named)), 2020)
        if draft == 3:
            report.skip("", "$schema", "draft 3 is not supported")
        return draft

    def _objects(self) -> Iterator[Part]:
        """Every object that may be a schema, without recursion."""
        waiting = [(self.root, 0)]
        while waiting:
            part, depth = waiting.pop()
            if depth > MOST_NESTED:
                raise TooLarge(f"the schema is nested more than {MOST_NESTED} levels deep: make it flatter")
            if isinstance(part.schema, dict):
                yield part
                waiting += [(part.at(key), depth + 1) for key in part.schema if key not in _NO_SCHEMAS]
            elif isinstance(part.schema, list):
                waiting += [(part.at(place), depth + 1) for place in range(len(part.schema))]

    def _find_anchor(self, part: Part) -> None:
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := part.schema.get(key), str):
                self._anchors.setdefault(name, part)
        for key in ("$id", "id"):  # drafts 4 to 7
            if isinstance(name := part.schema.get(key), str) and name.startswith("#"):
                self._anchors.setdefault(name[1:], part)
