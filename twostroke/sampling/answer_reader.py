"""Readers of an answer's text while it is made. They tell where stop strings do not apply, such as in tool calls."""

from collections.abc import Sequence
from typing import Protocol


class AnswerSpan(Protocol):
    """A stretch of an answer's text."""

    @property
    def written(self) -> str:
        """The text."""
        ...

    @property
    def plain(self) -> bool:
        """Whether a stop string in it ends the answer."""
        ...


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
