"""Answers whose text is known, to test how an API writes it."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from twostroke.engine.output import Token
from twostroke.engine.timings import Timings
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.tools.parser import parser_factory


def active_call(tokenizer: Tokenizer, functions: Sequence[dict[str, Any]]) -> Any:
    """What an answer asks of its active_call: one request, which offered these functions."""
    reader = parser_factory(tokenizer, functions, parallel=True)
    params = SimpleNamespace(reader=reader)
    request = SimpleNamespace(params=params, timings=Timings(), prompt_tokens=3, cached_by_tier=Counter(), result=None)
    return SimpleNamespace(requests=[request])


def tokens(text: str, reason: str = "stop", size: int = 3) -> list[Token]:
    """A text in tokens of `size` characters; an empty one ends it."""
    pieces = [*(text[i : i + size] for i in range(0, len(text), size)), ""]
    last = len(pieces) - 1
    return [Token(0, one, None, None, i, 0, reason if i == last else None) for i, one in enumerate(pieces)]
