"""The interface of a form: one way in which models write calls."""

from typing import Protocol

from twostroke.server.tools.source import Offered, Reading, Source


class Form(Protocol):
    """One way in which models write calls. Forms have no state: a generator reads one text.

    Attributes:
        opener: the text that may begin calls of this form.
        loose: the opener is common in other text too. So it begins a call only where an answer, or another call's end,
            is right before it; elsewhere it is a quotation.
    """

    @property
    def opener(self) -> str: ...

    @property
    def loose(self) -> bool: ...

    def read(self, source: Source, offered: Offered) -> Reading[None]:
        """Read one or several calls. `source.text` begins with the opener.

        Raises NotACall before anything is taken, if there is no call.
        """
        ...
