"""Calls as JSON objects that hold a name and arguments, alone or in a list, within markup or without."""

import json
import re
from dataclasses import dataclass
from functools import partial

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
    named_head,
    object_arguments,
    string_at,
)

NAMES, ARGUMENTS = ("name", "tool_name", "function", "tool"), ("arguments", "parameters")
BESIDE = ("type", "id", "tool_call_id", "index")
_WORD = re.compile(r"[\w.+-]+")
_WORDS = re.compile(r"[^,\]}\n]+")
FENCE = "```"
_LANGUAGE = re.compile(r"\w*")


@dataclass(frozen=True)
class CallHead:
    """A call up to its arguments."""

    name: str  # of the function
    start: int  # where its arguments begin, or what follows them if they are `known`
    open: str  # the brackets that are open there, such as "[{"
    known: str | None = None  # the arguments, where they came before the name, are a text, or are none


@dataclass(frozen=True)
class JsonCalls:
    """`opener`, perhaps a word or some marks, objects, and `closers`."""

    opener: str  # how it begins; "{" and "[" are those of the JSON itself
    # what else may come before the JSON. A fence, as opener or mark, may be followed by a language.
    marks: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()  # what may come after it
    loose: bool = False  # see `CallFormat`; such an object must have arguments

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        head = yield from source.when_certain(lambda text: self._first(text, offered))
        unclosed = ""
        while True:
            yield FunctionName(head.name)
            source.take(head.start)
            if head.known is not None:
                yield ArgumentsText(head.known, last=True)
            elif not (yield from object_arguments(source)):
                return
            unclosed = yield from _close(source, unclosed + head.open)
            while True:
                try:
                    head = yield from source.when_certain(lambda text: self._next(text, offered))
                    break
                except NotACall:
                    if not (yield from _skip_element(source, unclosed)):
                        yield from source.close(self.closers)
                        return
                    unclosed = yield from _close(source, unclosed)

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
        at, unclosed = after_space(text, at), ""
        if listed and text[at] == "[":
            at, unclosed = after_space(text, at + 1), "["
        if text.startswith("{{", at):  # Qwen2.5-Coder-1.5B's template shows calls with two braces
            at, unclosed = at + 1, unclosed + "{"
        return self._members(text, at, offered, unclosed + "{")

    def _members(self, text: str, at: int, offered: Offered, unclosed: str) -> CallHead:
        """The members up to the arguments and the name. `unclosed`: the brackets that are open within the object."""
        name = known = None
        while True:
            if name is not None and (known is not None or (text[at] == "}" and not self.loose)):
                return CallHead(name, at, unclosed, known or "{}")
            if text[at] not in "{,":
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
                    return CallHead(name, at, unclosed)
                known, at = _value(text, at)
            elif key in NAMES and text[at] == '"':
                name, at = string_at(text, at)
                name = name.removeprefix("functions.") if name not in offered else name
                if name not in offered:
                    raise NotACall
            elif key == "function" and text[at] == "{":
                return self._members(text, at, offered, unclosed + "{")
            else:
                at = _scalar(text, at)
            at = after_space(text, at)

    def _key(self, text: str, at: int, offered: Offered) -> tuple[str, int]:
        """A key that calls have. Raises NotACall for another one as soon as it differs."""
        keys = (*NAMES, *ARGUMENTS, *BESIDE, *(() if self.loose else offered))
        if not any(f'"{key}"'.startswith(text[at : at + len(key) + 2]) for key in keys):
            raise NotACall
        return string_at(text, at)

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


def _close(source: TextBuffer, unclosed: str) -> Reading[str]:
    """Take what follows a call's arguments up to the end of its brackets, further members as well.

    Returns the brackets that are still open.
    """
    while True:
        try:
            size, unclosed = yield from source.when_certain(partial(_rest, unclosed=unclosed))
        except NotACall:
            return unclosed
        source.take(size)


def _rest(text: str, unclosed: str) -> tuple[int, str]:
    """The length of a closing bracket or of a member, and what is open then. Raises Incomplete or NotACall."""
    at = after_space(text, 0)
    if text[at] in "}]":
        return at + 1, unclosed[:-1]
    if text[at] != "," or unclosed[-1:] != "{":
        raise NotACall
    at = after_space(text, at + 1)
    if text[at] == "}":
        return at, unclosed
    at = after_space(text, string_at(text, at)[1])
    if text[at] != ":":
        raise NotACall
    return _end_of_value(text, after_space(text, at + 1)), unclosed


def _skip_element(source: TextBuffer, unclosed: str) -> Reading[bool]:
    """Take an element of an open list that is no call. Returns whether there was one.

    What was cut off within an open bracket is taken, too.
    """

    def element(text: str) -> int:
        at = after_space(text, 0)
        if text[at] != "," or unclosed[-1:] != "[":
            raise NotACall
        return _end_of_value(text, after_space(text, at + 1))

    try:
        source.take((yield from source.when_certain(element)))
    except NotACall:
        if source.ended and unclosed and source.text.lstrip().startswith(","):
            source.take(len(source.text))
        return False
    return True


def _end_of_value(text: str, at: int) -> int:
    """Where a JSON value ends, or what stands in its place. Raises Incomplete or NotACall."""
    if text[at] == '"':
        return string_at(text, at)[1]
    if text[at] in "{[":
        value = ValueEnd()
        end = at + value.find(text[at:])
        if value.open:
            raise Incomplete
        return end
    match = _WORDS.match(text, at)
    if match is None:
        raise NotACall
    if match.end() == len(text):
        raise Incomplete
    return match.end()


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


@dataclass(frozen=True)
class NamedJson:
    """`opener`, a head that names the function, an object, and `closers`."""

    opener: str  # how it begins
    head: str  # a pattern of all that comes before the object; its group is the name
    closers: tuple[str, ...] = ()  # what may come after the object, in any order
    loose: bool = False

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        pattern = re.compile(self.head + r"\s*(?=\{)", re.DOTALL)

        name, start = yield from source.when_certain(lambda text: named_head(pattern, text, offered))
        yield FunctionName(name)
        source.take(start)
        if (yield from object_arguments(source)):
            yield from source.close(self.closers)
