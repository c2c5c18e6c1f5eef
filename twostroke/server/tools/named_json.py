"""Calls whose name stands in the markup, and whose arguments are a JSON object."""

import re
from dataclasses import dataclass

from twostroke.server.tools.text_buffer import FunctionName, Offered, Reading, TextBuffer, named_head, object_arguments


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

        name, start = yield from source.when_certain(lambda text: named_head(pattern, text, offered))
        yield FunctionName(name)
        source.take(start)
        if (yield from object_arguments(source)):
            yield from source.close(self.closers)
