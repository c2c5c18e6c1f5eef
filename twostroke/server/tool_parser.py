"""Reads tool calls out of a text that comes in pieces; names and arguments are passed on once they are certain."""

import re
import secrets
from dataclasses import dataclass

from twostroke.checkpoints.textstream import StopStrings
from twostroke.server.tools import CLOSE, OPEN

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')


@dataclass(frozen=True)
class PlainText:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. `index` counts the answer's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments; joined, they are a JSON text."""

    index: int
    text: str


Piece = PlainText | CallStart | CallArguments


class ToolParser:
    """A state machine: outside of calls, in a call's head, in its arguments, or after them.

    Attributes:
        calls: how many calls have begun.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._outside = StopStrings([OPEN])
        self._state = self._say
        self._rest = ""
        self._json = _JsonEnd()

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain after this text."""
        pieces: list[Piece] = []
        self._rest += text
        while self._state(pieces):
            pass
        return [piece for piece in pieces if not (isinstance(piece, PlainText | CallArguments) and not piece.text)]

    def flush(self) -> list[Piece]:
        """The pieces held back, once the text has ended. An incomplete head of a call is plain text."""
        rest = self._outside.flush() if self._state == self._say else ""
        if self._state == self._read_head:
            rest, self._rest = OPEN + self._rest, ""
        return [PlainText(rest)] if rest else []

    def _say(self, pieces: list[Piece]) -> bool:
        whole, self._rest = self._rest, ""
        text, opened = "", None
        # The opening tag is searched for character by character, so that the text after it is kept.
        for place, char in enumerate(whole, 1):
            said, opened = self._outside.push(char)
            text += said
            if opened:
                self._outside, self._state, self._rest = StopStrings([OPEN]), self._read_head, whole[place:]
                break
        pieces.append(PlainText(text))
        return opened is not None

    def _read_head(self, pieces: list[Piece]) -> bool:
        head = _HEAD.match(self._rest)
        if head is None or head.end() == len(self._rest):
            return False
        pieces.append(CallStart(self.calls, f"call_{secrets.token_hex(12)}", head[1]))
        self.calls += 1
        self._rest, self._json, self._state = self._rest[head.end() :], _JsonEnd(), self._read_arguments
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        end = self._json.find(self._rest)
        pieces.append(CallArguments(self.calls - 1, self._rest[:end]))
        self._rest = self._rest[end:]
        if self._json.open:
            return False
        self._state = self._leave
        return True

    def _leave(self, pieces: list[Piece]) -> bool:
        _, closed, rest = self._rest.partition(CLOSE)
        if not closed:
            return False
        self._state, self._rest = self._part, rest
        return True

    def _part(self, pieces: list[Piece]) -> bool:
        """Skip line breaks between calls: they are not part of the text."""
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._state = self._say
        return bool(self._rest)


class _JsonEnd:
    """Finds where a JSON object or array ends, in pieces."""

    def __init__(self) -> None:
        self.open = True
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int:
        """How much of the text belongs to the value."""
        for place, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.open = False
                    return place + (self._depth == 0)
        return len(text)
