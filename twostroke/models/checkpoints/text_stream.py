"""Text from a growing list of tokens: an incremental detokenizer, and stop strings that may span tokens."""

import codecs
from collections.abc import Callable, Sequence

from twostroke.errors import InvalidRequest


class TextStream:
    """Turns token ids into text as they arrive. All pushes and the flush, joined, equal `Tokenizer.decode` of all ids.

    A token may end inside a UTF-8 sequence. The incomplete rest is held back until later bytes complete it, so text
    that was returned never changes.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], hidden: frozenset[int] = frozenset(), *, strip_leading_space: bool
    ) -> None:
        """`bytes_of` returns a token's bytes; `hidden`: tokens without text; `strip_leading_space` drops one space at
        the beginning of the text."""
        self._bytes_of, self._hidden = bytes_of, hidden
        self._strip = strip_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; it may be empty, or include text held back earlier."""
        data = b"" if token_id in self._hidden else self._bytes_of(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for an incomplete sequence at the end, if there is one. Nothing is held back afterwards."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first of some strings in text that arrives in pieces. Text that may begin a match is held back.

    The match that ends first wins, since generation can end there; of several that end together, the longest.
    The result does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidRequest("stop strings must be a list of strings that are not empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that can be emitted, the stop string found or None). The stop and all text after it are not emitted."""
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        buffer = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            _, start, self._matched = min(found)  # the earliest end, then the earliest start
            self._held = ""
            return buffer[:start], self._matched
        keep = self._pending(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matched

    def flush(self) -> str:
        """The text held back, at the end of the input."""
        held, self._held = self._held, ""
        return held

    def _pending(self, buffer: str) -> int:
        """The length of the longest suffix that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stops):
                return length
        return 0
