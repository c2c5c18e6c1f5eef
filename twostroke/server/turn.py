"""One choice's tokens as an API shows them: pieces of text and of calls, and why the turn ended."""

from twostroke.engine.track import Token
from twostroke.server.tool_parser import Piece, PlainText, ToolParser


class Turn:
    """Reads the tokens of one choice. Every API that has conversations writes its answers from these pieces."""

    def __init__(self, tools: bool) -> None:
        """`tools`: calls may be in the text."""
        self._parser = ToolParser() if tools else None

    def read(self, token: Token) -> list[Piece]:
        """The pieces that are certain after this token."""
        if self._parser is None:
            return [PlainText(token.text)] if token.text else []
        pieces = self._parser.push(token.text)
        return pieces + self._parser.flush() if token.finish_reason is not None else pieces

    def reason(self, token: Token) -> str | None:
        """Why the turn ended with this token: "stop", "length" or "tool_calls"; None if it goes on."""
        called = self._parser is not None and self._parser.calls > 0
        return "tool_calls" if token.finish_reason == "stop" and called else token.finish_reason
