"""Answers on the screen while they are made, with their thoughts."""

from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class AnswerWriter:
    """Writes one answer. Its thought is dim on a terminal, and left out elsewhere, where the answer is piped on."""

    def __init__(self, out: TextIO | None) -> None:
        self._out, self._thinking = out, False

    def write(self, thought: str, answer: str) -> None:
        """Write what is new of both, at once."""
        if self._out is None:
            return
        if thought and self._out.isatty():
            self._out.write(f"{DIM}{thought}{PLAIN}")
            self._thinking = True
        if answer and self._thinking:
            self._out.write("\n\n")
            self._thinking = False
        self._out.write(answer)
        self._out.flush()
