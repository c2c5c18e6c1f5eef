"""Calls written as Python: `[get_weather(city="Paris"), now()]`."""

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
)

PRINT = "print"  # Gemma prints a call's result
CUT = "{"  # the arguments of a call that was cut off
_WORDS = {"true": True, "false": False, "null": None}
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)?\s*(\(?)")


@dataclass(frozen=True)
class Pythonic:
    """`opener`, calls in a list or one in each line, and `closers`."""

    opener: str  # how it begins; "[" is that of the list itself
    inside: str = ""  # a pattern of what else may come before the calls
    closers: tuple[str, ...] = ()  # what comes after them. Without any, the calls are one list.
    loose: bool = False

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        before = re.compile(("" if self.opener == "[" else re.escape(self.opener) + self.inside) + r"\s*")

        def calls(text: str) -> tuple[list[tuple[str, str]], int]:
            match = before.match(text)
            if match is None:
                raise NotACall
            return self._calls(text, match.end(), offered, ended=source.ended)

        found, size = yield from source.when_certain(calls)
        for name, arguments in found:
            yield FunctionName(name)
            yield ArgumentsText(arguments, last=arguments != CUT)
        source.take(size)
        yield from source.close(self.closers)

    def _calls(self, text: str, at: int, offered: Offered, *, ended: bool) -> tuple[list[tuple[str, str]], int]:
        """(names and arguments, where they end). Raises Incomplete or NotACall."""
        rest = text[at:]
        listed = rest.startswith("[")
        if not rest:
            raise Incomplete
        # The first name decides early.
        match = _NAME.match(rest, 1 if listed else 0)
        assert match is not None
        name, paren = match.groups()
        arriving = match.end() == len(rest) and not paren
        if arriving and not ended and any(one.startswith(name or "") for one in (*offered, PRINT)):
            raise Incomplete
        if not paren or (name not in offered and name != PRINT):
            raise NotACall
        try:
            size = bracket_end(rest) if listed else self._lines_end(rest)
        except Incomplete:
            if not ended or name not in offered:
                raise
            return [(name, CUT)], len(text)
        return parsed(rest[:size].strip(), offered), at + size

    def _lines_end(self, text: str) -> int:
        """Where calls that are in no list end. Raises Incomplete."""
        ends = [text.find(closer) for closer in self.closers if closer in text]
        if not ends:
            raise Incomplete
        return min(ends)


def bracket_end(text: str) -> int:
    """Where the list that begins the text ends. Raises Incomplete."""
    depth, quote, at = 0, "", 0
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    raise Incomplete


def parsed(text: str, offered: Offered) -> list[tuple[str, str]]:
    """The names and JSON arguments of calls. Raises NotACall if anything else is there."""
    try:
        nodes = [statement.value for statement in ast.parse(text).body if isinstance(statement, ast.Expr)]
        calls = [call for node in nodes for call in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
        made = [_call(call, offered) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACall from None
    if not made:
        raise NotACall
    return made


def _call(node: ast.expr, offered: Offered) -> tuple[str, str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == PRINT and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, ast.Call) or (name := ast.unparse(node.func)) not in offered:
        raise ValueError
    arguments = dict(zip(_parameters(offered[name]), map(_literal, node.args), strict=False))
    if len(arguments) < len(node.args):
        raise ValueError
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        arguments[keyword.arg] = _literal(keyword.value)
    return name, json.dumps(arguments, ensure_ascii=False)


def _literal(node: ast.expr) -> Any:
    """A literal's value; true, false and null may be written as in JSON. Raises ValueError for anything else."""
    match node:
        case ast.Name(id) if id in _WORDS:
            return _WORDS[id]
        case ast.List() | ast.Tuple():
            return [_literal(item) for item in node.elts]
        case ast.Dict():
            return {str(_literal(k)) if k else "": _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
        case _:
            value = ast.literal_eval(node)
            json.dumps(value, allow_nan=False)
            return value


def _parameters(function: Mapping[str, Any]) -> list[str]:
    properties = (function.get("parameters") or {}).get("properties")
    return list(properties) if isinstance(properties, Mapping) else []
