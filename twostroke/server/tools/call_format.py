"""The interface of a call format: one way in which models write calls."""

from typing import Protocol

from twostroke.server.tools.text_buffer import Offered, Reading, TextBuffer


class CallFormat(Protocol):
    """One way in which models write calls. Formats have no state: `read` is a generator over one text.

    Attributes:
        opener: the text that may begin calls of this format.
        loose: the opener is common in other text too. So it begins a call only where an answer, or another call's end,
            is right before it; elsewhere it is a quotation.
    """

    @property
    def opener(self) -> str: ...

    @property
    def loose(self) -> bool: ...

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        """Read one or several calls. `source.text` begins with the opener.

        Raises NotACall before anything is taken, if there is no call.
        """
        ...
