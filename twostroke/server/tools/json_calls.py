"""Calls as JSON objects that hold a name and arguments, alone or in a list, within markup or without."""

import json
import re
from dataclasses import dataclass

from twostroke.server.tools.text_buffer import (
    ArgumentsText,
    FunctionName,
    Incomplete,
    NotACall,
    Offered,
    Reading,
    TextBuffer,
    ValueEnd,
    after_space,
    object_arguments,
    string_at,
)

NAMES, ARGUMENTS = ("name", "tool_name", "function", "tool"), ("arguments", "parameters")
BESIDE = ("type", "id", "tool_call_id", "index")
_WORD = re.compile(r"[\w.+-]+")
FENCE = "```"
_LANGUAGE = re.compile(r"\w*")


@dataclass(frozen=True)
class CallHead:
    """Where a call's arguments begin. `known`: the arguments, where they came before the name or are none."""

    name: str
    start: int
    known: str | None = None


@dataclass(frozen=True)
class JsonCalls:
    """`opener`, perhaps a word or some marks, objects, and `closers`.

    Attributes:
        opener: how it begins; "{" and "[" are those of the JSON itself.
        marks: what else may come before the JSON. A fence, as opener or mark, may be followed by a language.
        closers: what may come after it.
        loose: see `CallFormat`; such an object must have arguments.
    """

    opener: str
    marks: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    loose: bool = False

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        head = yield from source.when_certain(lambda text: self._first(text, offered))
        while True:
            yield FunctionName(head.name)
            source.take(head.start)
            if head.known is not None:
                yield ArgumentsText(head.known, last=True)
            elif not (yield from object_arguments(source)):
                return
            yield from self._close(source)
            try:
                head = yield from source.when_certain(lambda text: self._next(text, offered))
            except NotACall:
                break
        yield from source.close(self.closers)

    def _first(self, text: str, offered: Offered) -> CallHead:
        """The beginning of the first object, after the opener and the marks. Raises Incomplete or NotACall."""
        at, mark = 0, None if self.opener in "{[" else self.opener
        while mark is not None:
            at += len(mark)
            if mark == FENCE and (language := _LANGUAGE.match(text, at)):
                at = language.end()
            at = after_space(text, at)
            if any(mark.startswith(text[at:]) and mark != text[at:] for mark in self.marks):
                raise Incomplete
            mark = next((mark for mark in self.marks if text.startswith(mark, at)), None)
        return self._head(text, at, offered, listed=True)

    def _head(self, text: str, at: int, offered: Offered, *, listed: bool) -> CallHead:
        """The beginning of an object. Raises Incomplete or NotACall."""
        at = after_space(text, at)
        if listed and text[at] == "[":
            at = after_space(text, at + 1)
        if text.startswith("{{", at):  # Qwen2.5-Coder-1.5B's template shows calls with two braces
            at += 1
        return self._members(text, at, offered)

    def _members(self, text: str, at: int, offered: Offered) -> CallHead:
        name = known = None
        while True:
            if text[at] not in "{,":
                # The object ends, or is none.
                if text[at] == "}" and name is not None and (known is not None or not self.loose):
                    return CallHead(name, at, known or "{}")
                raise NotACall
            at = after_space(text, at + 1)
            key, at = self._key(text, at, offered)
            at = after_space(text, at)
            if text[at] != ":":
                raise NotACall
            at = after_space(text, at + 1)
            keyed = key in offered and not self.loose and key not in (*NAMES, *ARGUMENTS, *BESIDE)
            if key in ARGUMENTS or keyed:
                name = key if keyed else name
                if name is not None and text[at] == "{":
                    return CallHead(name, at)
                known, at = _value(text, at)
            elif key in NAMES and text[at] == '"':
                name, at = string_at(text, at)
                name = name.removeprefix("functions.") if name not in offered else name
                if name not in offered:
                    raise NotACall
            elif key == "function" and text[at] == "{":
                return self._members(text, at, offered)
            else:
                at = _scalar(text, at)
            at = after_space(text, at)

    def _key(self, text: str, at: int, offered: Offered) -> tuple[str, int]:
        """A key that calls have. Raises NotACall for another one as soon as it differs."""
        keys = (*NAMES, *ARGUMENTS, *BESIDE, *(() if self.loose else offered))
        if not any(f'"{key}"'.startswith(text[at : at + len(key) + 2]) for key in keys):
            raise NotACall
        return string_at(text, at)

    def _close(self, source: TextBuffer) -> Reading[None]:
        """Take the rest of a call's object, and of its list."""
        try:
            while True:
                source.take((yield from source.when_certain(_rest)))
        except NotACall:
            return

    def _next(self, text: str, offered: Offered) -> CallHead:
        """A further call, after a comma or a semicolon or neither. Raises Incomplete or NotACall."""
        at = after_space(text, 0)
        at = after_space(text, at + 1) if text[at] in ",;" else at
        if text[at] != "{":
            raise NotACall
        return self._head(text, at, offered, listed=False)


def _scalar(text: str, at: int) -> int:
    """Where a text, a number or a word ends."""
    if text[at] == '"':
        return string_at(text, at)[1]
    match = _WORD.match(text, at)
    if match is None:
        raise NotACall
    return match.end()


def _rest(text: str) -> int:
    """The length of a closing bracket, or of a member that follows the arguments. Raises Incomplete or NotACall."""
    at = after_space(text, 0)
    if text[at] in "}]":
        return at + 1
    if text[at] != "," or text[at := after_space(text, at + 1)] != '"':
        raise NotACall
    key, at = string_at(text, at)
    if key not in BESIDE or text[at := after_space(text, at)] != ":":
        raise NotACall
    at = _scalar(text, after_space(text, at + 1))
    after_space(text, at)
    return at


def _value(text: str, at: int) -> tuple[str, int]:
    """Arguments that are not passed on as they come: an object, a string that holds one, or null."""
    if text.startswith("null"[: len(text) - at], at):
        if len(text) < at + 4:
            raise Incomplete
        return "{}", at + 4
    if text[at] == '"':
        written, at = string_at(text, at)
        if not written.strip():
            return "{}", at
    else:
        end = ValueEnd()
        size = end.find(text[at:])
        if text[at] != "{":
            raise NotACall
        if end.open:
            raise Incomplete
        written, at = text[at : at + size], at + size
    try:
        value = json.loads(written, strict=False)
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return written, at
