"""Readers of an answer's text while it is made: its thought, text and calls, and where stop strings do not apply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True)
class AnswerSpan:
    """A stretch of an answer's text."""

    written: str  # the text as the model wrote it
    plain: bool = False  # whether a stop string in it ends the answer
    pieces: tuple[Piece, ...] = ()  # what is shown of it: nothing of markup


class AnswerReader(Protocol):
    """Follows one choice's text. It must depend only on the text, not on the pieces in which it comes."""

    def spans(self, text: str, ended: bool = False, cut: bool = False) -> Sequence[AnswerSpan]:
        """The stretches that are certain after this text.

        `ended`: no more will come, so nothing is held back; `cut`: the text was cut off.
        """
        ...


class AnswerReaderFactory(Protocol):
    """Makes a reader for every choice."""

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens whose text the reader, and the answer, must see."""
        ...

    def __call__(self) -> AnswerReader: ...
