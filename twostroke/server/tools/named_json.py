"""Calls whose name stands in the markup, and whose arguments are a JSON object."""

import re
from dataclasses import dataclass

from twostroke.server.tools.text_buffer import (
    FunctionName,
    Incomplete,
    NotACall,
    Offered,
    Reading,
    TextBuffer,
    object_arguments,
)

MAX_HEAD = 300  # characters of markup and name


@dataclass(frozen=True)
class NamedJson:
    """`opener`, a head that names the function, an object, and `closers`.

    Attributes:
        opener: how it begins.
        head: a pattern of all that comes before the object; its group is the name.
        closers: what may come after the object, in any order.
    """

    opener: str
    head: str
    closers: tuple[str, ...] = ()
    loose: bool = False

    def read(self, source: TextBuffer, offered: Offered) -> Reading[None]:
        pattern = re.compile(self.head + r"\s*(?=\{)", re.DOTALL)

        def head(text: str) -> tuple[str, int]:
            match = pattern.match(text)
            if match is None:
                if len(text) > MAX_HEAD:
                    raise NotACall
                raise Incomplete
            if match[1] not in offered:
                raise NotACall
            return match[1], match.end()

        name, start = yield from source.when_certain(head)
        yield FunctionName(name)
        source.take(start)
        if (yield from object_arguments(source)):
            yield from source.close(self.closers)
