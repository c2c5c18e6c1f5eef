"""Markup: calls whose parameters stand between tags, and what is neither text nor a call."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.server.tools.text_buffer import (
    ArgumentsText,
    FunctionName,
    Incomplete,
    NotACall,
    Offered,
    Reading,
    TextBuffer,
    named_head,
)


@dataclass(frozen=True)
class Tagged:
    """`opener`, a head that names the function, parameters as text, whose schema says what each is, and `end`."""

    opener: str  # how it begins
    head: str  # a pattern of all that comes before the first parameter; its group is the name
    parameter: str  # a pattern whose groups are a parameter's name and its text
    end: str  # what ends the call
    closers: tuple[str, ...] = ()  # what may come after the end
    loose: bool = False

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        head = re.compile(self.head, re.DOTALL)
        parameter = re.compile(self.parameter, re.DOTALL)

        def call(text: str) -> tuple[str, str, int | None]:
            name, start = named_head(head, text, offered)
            end = text.find(self.end, start)
            if end < 0 and not source.ended:
                raise Incomplete
            body = text[start:end] if end >= 0 else text[start:]
            types = (offered[name].get("parameters") or {}).get("properties")
            types = types if isinstance(types, Mapping) else {}
            values = {key.strip(): typed(value, types.get(key.strip())) for key, value in parameter.findall(body)}
            size = None if end < 0 else end + len(self.end)
            return name, json.dumps(values, ensure_ascii=False), size

        name, arguments, size = yield from source.when_certain(call)
        yield FunctionName(name)
        if size is None:  # cut off: what is there is passed on, not as complete
            yield ArgumentsText(arguments.removesuffix("}"))
            source.take(len(source.text))
            return
        yield ArgumentsText(arguments, last=True)
        source.take(size)
        yield from source.close(self.closers)


@dataclass(frozen=True)
class IgnoredMarkup:
    """`opener` alone, or with all text up to `end`, is left out."""

    opener: str
    end: str | None = None
    loose: bool = False

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        def size(text: str) -> int:
            if not text.startswith(self.opener):
                raise Incomplete if self.opener.startswith(text) else NotACall
            return len(self.opener)

        source.take((yield from source.when_certain(size)))
        while self.end is not None:
            if (at := source.text.find(self.end)) >= 0 or source.ended:
                source.take(at + len(self.end) if at >= 0 else len(source.text))
                return
            yield None


def typed(text: str, schema: Any) -> Any:
    """A parameter's value. What the schema calls a string, or what is no JSON, stays a text."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not ("null" in kinds and text.strip() in ("null", "None")):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            return value
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return {"true": True, "false": False}.get(text.strip().lower(), text)
