"""The text of an answer as it arrives, and what call formats read from it.

A format reads with a generator. It yields None when it needs more text, and a `FunctionName` or `ArgumentsText` once
that part of a call is certain. It takes the text that belongs to calls, and leaves the rest.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

MAX_HEAD = 300  # characters of markup and a name
T = TypeVar("T")


@dataclass(frozen=True)
class FunctionName:
    """A call of this function begins."""

    name: str


@dataclass(frozen=True)
class ArgumentsText:
    """More of the arguments' JSON text. `last`: they are complete."""

    text: str
    last: bool = False


Reading = Generator[FunctionName | ArgumentsText | None, None, T]
Offered = Mapping[str, Mapping[str, Any]]  # the functions that may be called, by name, as OpenAI describes them


class Incomplete(Exception):
    """The text so far may begin a call; more is needed to tell."""


class NotACall(Exception):
    """The text is no call, whatever follows."""


class TextBuffer:
    """Text that has arrived and was not taken yet.

    Attributes:
        text: that text.
        ended: whether no more will come.
    """

    def __init__(self) -> None:
        self.text, self.ended = "", False

    def take(self, count: int) -> str:
        """Take text from the beginning."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def when_certain(self, read: Callable[[str], T]) -> Reading[T]:
        """The result of `read`, asked again with more text as long as it raises Incomplete.

        Raises NotACall, also when the text ends first.
        """
        while True:
            try:
                return read(self.text)
            except Incomplete:
                if self.ended:
                    raise NotACall from None
                yield None

    def close(self, closers: Sequence[str]) -> Reading[None]:
        """Take those of these texts that come next, each once, and white space before them.

        Waits while one of them may be arriving.
        """
        left = list(closers)
        while left:
            text = self.text.lstrip()
            if found := next((closer for closer in left if text.startswith(closer)), None):
                self.take(len(self.text) - len(text) + len(found))
                left.remove(found)
            elif self.ended or (text and not any(closer.startswith(text) for closer in left)):
                return
            else:
                yield None


class CallFormat(Protocol):
    """One way in which models write calls. Formats have no state: `read` is a generator over one text.

    Attributes:
        opener: the text that may begin calls of this format.
        loose: the opener is common in other text too. So it begins a call only where an answer, or another call's end,
            is right before it; elsewhere it is a quotation.
    """

    @property
    def opener(self) -> str: ...

    @property
    def loose(self) -> bool: ...

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        """Read one or several calls. `source.text` begins with the opener.

        Raises NotACall before anything is taken, if there is no call.
        """
        ...


def named_head(pattern: re.Pattern[str], text: str, offered: Offered) -> tuple[str, int]:
    """The function that markup at the text's beginning names in the pattern's group, and where the markup ends.

    Raises Incomplete, or NotACall for a function that is not offered.
    """
    match = pattern.match(text)
    if match is None:
        raise NotACall if len(text) > MAX_HEAD else Incomplete
    name = match[1].strip()
    if name not in offered:
        raise NotACall
    return name, match.end()


_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


def after_space(text: str, at: int) -> int:
    """The index of the first character from `at` on that is no white space. Raises Incomplete if there is none."""
    match = _SPACE.match(text, at)
    assert match is not None
    if match.end() == len(text):
        raise Incomplete
    return match.end()


def string_at(text: str, at: int) -> tuple[str, int]:
    """The JSON string that begins at `at`, and where it ends. Raises Incomplete or NotACall."""
    if text[at] != '"':
        raise NotACall
    match = _STRING.match(text, at)
    if match is None:
        raise Incomplete
    try:
        return json.loads(match[0], strict=False), match.end()
    except ValueError:
        raise NotACall from None


class ValueEnd:
    """Finds where a JSON object or array ends, in text that comes in pieces."""

    def __init__(self) -> None:
        self.open = True
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int:
        """How much of the text belongs to the value."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._in_string:
                match = _IN_STRING.match(text, at)
                assert match is not None
                at = match.end()
                if at < len(text):
                    self._in_string, self._escaped, at = text[at] == "\\", text[at] == "\\", at + 1
            elif match := _STRUCTURE.search(text, at):
                at = match.end()
                if match[0] == '"':
                    self._in_string = True
                else:
                    self._depth += 1 if match[0] in "{[" else -1
                    if self._depth <= 0:
                        self.open = False
                        return at
            else:
                return len(text)
        return len(text)


def object_arguments(source: TextBuffer) -> Reading[bool]:
    """The arguments object at the source's beginning, passed on as it comes. Returns whether it was complete."""
    end = ValueEnd()
    while True:
        text = source.take(end.find(source.text))
        if text or not end.open:
            yield ArgumentsText(text, last=not end.open)
        if not end.open:
            return True
        if source.ended:
            return False
        yield None
