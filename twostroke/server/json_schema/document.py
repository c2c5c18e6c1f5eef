"""A schema as the client wrote it: its references, and a report of what cannot be enforced."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from twostroke.errors import InvalidRequest

MAX_DEPTH = 100
MAX_WARNINGS = 20


class Report:
    """Raises for what a strict schema asks and nobody can enforce. Collects warnings for any other schema."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.warnings: list[str] = []

    def unenforced(self, path: str, keyword: str, why: str, effect: str = "is skipped") -> None:
        """Report a keyword that is not enforced, or not in full.

        Args:
            path: JSON pointer of the schema that has the keyword.
            keyword: its name.
            why: why it cannot be enforced.
            effect: what becomes of it where the schema is not strict.

        Raises:
            InvalidRequest: the schema is strict.
        """
        where = f"{keyword!r:.60} at {pointer('#' + path[-200:], keyword[:60])}"
        if self.strict:
            raise InvalidRequest(f"{where}: {why}: leave it out, or set strict to false")
        self.warn(f"{where} {effect}: {why}")

    def warn(self, text: str) -> None:
        """Add a warning once."""
        if text not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)


def check_depth(schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a schema that is nested too deeply."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            one
            for value in level
            if isinstance(value, dict | list)
            for one in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise InvalidRequest(f"the schema is nested more than {MAX_DEPTH} levels deep: make it flatter")


def resolve(schema: Any, reference: Any) -> tuple[Any, str] | None:
    """What a JSON pointer into the schema leads to, and its path; None for any other reference."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    path = unquote(reference[1:])
    for step in path.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name in map(str, range(len(schema))):
            schema = schema[int(name)]
        else:
            return None
    return (schema, path) if isinstance(schema, dict | bool) else None


def pointer(path: str, *steps: str | int) -> str:
    """A JSON pointer (RFC 6901) continued."""
    return "/".join([path, *(str(step).replace("~", "~0").replace("/", "~1") for step in steps)])
