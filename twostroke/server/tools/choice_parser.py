"""Parses one choice's tokens into what an API shows: text, calls, and why the turn ended."""

from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.server.tools.parser import ToolParserFactory
from twostroke.server.tools.pieces import Piece, PlainText


class ChoiceParser:
    """Reads the tokens of one choice. Every API that has conversations writes its answers from these pieces."""

    def __init__(self, request: Request) -> None:
        """`request`: the choice's, which says how calls in the text are read."""
        reader = request.params.reader
        self._parser = reader() if isinstance(reader, ToolParserFactory) else None

    def read(self, token: Token) -> list[Piece]:
        """The pieces that are certain after this token."""
        if self._parser is None:
            return [PlainText(token.text)] if token.text else []
        pieces = self._parser.push(token.text)
        if token.finish_reason is not None:
            pieces += self._parser.flush(cut=token.finish_reason == "length")
        return pieces

    def reason(self, token: Token) -> str | None:
        """Why the turn ended with this token, once it is read: "stop", "length" or "tool_calls"; None if it goes on."""
        called = self._parser is not None and self._parser.calls > 0 and self._parser.complete
        return "tool_calls" if token.finish_reason == "stop" and called else token.finish_reason
