"""Parses one choice's tokens into what an API shows: thoughts, text, calls, and why the turn ended."""

from twostroke.api.reasoning.reader import Phase, ReasoningReader
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.sampling.answer_reader import Piece, PlainText
from twostroke.server.tools.parser import ToolParser


class ChoiceParser:
    """Reads the tokens of one choice. Every API that has conversations writes its answers from these pieces."""

    def __init__(self, request: Request) -> None:
        """`request`: the choice's, which says how thoughts and calls in the text are read."""
        reader = request.params.reader
        self._reader = None if reader is None else reader()
        self._tools = self._reader.answer if isinstance(self._reader, ReasoningReader) else self._reader
        self.reasoning_tokens = 0  # tokens of the thought so far, its marks included
        self._undecided = 0  # tokens that belong to the thought if one begins

    def read(self, token: Token) -> list[Piece]:
        """The pieces that are certain after this token."""
        if self._reader is None:
            return [PlainText(token.text)] if token.text else []
        before = self._phase
        spans = [*self._reader.spans(token.text)]
        if token.finish_reason is not None:
            spans += self._reader.spans("", ended=True, cut=token.finish_reason == "length")
        self._count(before, self._phase)
        return [piece for span in spans for piece in span.pieces]

    def reason(self, token: Token) -> str | None:
        """Why the turn ended with this token, once it is read: "stop", "length" or "tool_calls"; None if it goes on."""
        called = isinstance(self._tools, ToolParser) and self._tools.calls > 0 and self._tools.complete
        return "tool_calls" if token.finish_reason == "stop" and called else token.finish_reason

    @property
    def _phase(self) -> Phase:
        return self._reader.phase if isinstance(self._reader, ReasoningReader) else Phase.ANSWER

    def _count(self, before: Phase, after: Phase) -> None:
        if Phase.THOUGHT in (before, after):
            self.reasoning_tokens += self._undecided + 1
        self._undecided = self._undecided + 1 if after is before is Phase.UNDECIDED else 0
