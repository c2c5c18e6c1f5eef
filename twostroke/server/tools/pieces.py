"""What an answer is made of once it is read: a thought, text, and calls of tools."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ThoughtText:
    """Text of a thought."""

    text: str


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


Piece = ThoughtText | PlainText | CallStart | CallArguments
