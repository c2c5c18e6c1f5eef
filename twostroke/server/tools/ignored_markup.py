"""Markup around an answer's text that is neither text nor a call."""

from dataclasses import dataclass

from twostroke.server.tools.text_buffer import Incomplete, NotACall, Offered, Reading, TextBuffer


@dataclass(frozen=True)
class IgnoredMarkup:
    """`opener` alone, or with all text up to `end`, is left out."""

    opener: str
    end: str | None = None
    loose: bool = False

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        def size(text: str) -> int:
            if not text.startswith(self.opener):
                raise Incomplete if self.opener.startswith(text) else NotACall
            return len(self.opener)

        source.take((yield from source.when_certain(size)))
        while self.end is not None:
            if (at := source.text.find(self.end)) >= 0 or source.ended:
                source.take(at + len(self.end) if at >= 0 else len(source.text))
                return
            yield None
