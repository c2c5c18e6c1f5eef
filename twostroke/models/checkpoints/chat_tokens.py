"""The tokens of a conversation, and which of them are the messages' own texts.

A template is a program, so its output does not tell what it was made from. Here it is rendered again with marks in
place of texts: what surrounds a mark surrounds the text too.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from twostroke.errors import InvalidRequest

MARK, END = "\ue000", "\ue001"  # characters of the private use area
Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]  # characters


class ChatTokens(list[int]):
    """The ids of a conversation."""

    def __init__(
        self,
        ids: Iterable[int],
        messages: Messages,
        text: str,
        render: Callable[[Messages], str],
        offsets: Callable[[str], Sequence[Span]],
    ) -> None:
        """Args:
        text: `messages` as rendered; `ids` are its tokens.
        render: renders changed messages in the same way.
        offsets: gives the span of each token of a text.
        """
        super().__init__(ids)
        self._messages, self._text, self._render, self._offsets = messages, text, render, offsets

    @property
    def text(self) -> str:
        """The conversation as rendered."""
        return self._text

    @cached_property
    def turn(self) -> range | None:
        """The indices of the last user message's text; None if unknown. Computed on first access."""
        messages, text = self._messages, self._text
        last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=None)
        if last is None or not isinstance(messages[last].get("content"), str):
            return None
        marked = self._render([*messages[:last], {**messages[last], "content": MARK}, *messages[last + 1 :]])
        before, found, after = marked.rpartition(MARK)
        if not found or MARK in before or not (text.startswith(before) and text.endswith(after)):
            return None
        return self._ranges([(len(before), len(text) - len(after))])[0]

    @cached_property
    def contents(self) -> Sequence[tuple[str, range]]:
        """(role, indices of the text) of each message; all other tokens are the template's.

        If the template changes a text, only the last user's is found, or none. Computed on first access.
        """
        messages = self._messages
        said = [i for i, one in enumerate(messages) if isinstance(one.get("content"), str) and one["content"]]
        marked = [{**one, "content": f"{MARK}{i}{END}"} if i in said else one for i, one in enumerate(messages)]
        with suppress(InvalidRequest):
            first, *between = re.split(f"{MARK}([0-9]+){END}", self._render(marked))
            if between[::2] == [str(i) for i in said]:
                texts = [messages[i]["content"] for i in said]
                spans = _spans(self._text, texts, [first, *between[1::2]])
                if spans is not None:
                    found = zip(said, self._ranges(spans), strict=True)
                    return [(messages[i]["role"], place) for i, place in found if place is not None]
        return [] if self.turn is None else [("user", self.turn)]

    def _ranges(self, spans: Sequence[Span]) -> list[range | None]:
        """The indices of the tokens that lie entirely in each of these increasing spans; None where there are none."""
        offsets = self._offsets(self._text)
        found: list[range | None] = []
        token = 0
        for start, stop in spans:
            inside: list[int] = []
            while token < len(offsets) and offsets[token][1] <= stop:
                if start <= offsets[token][0] < offsets[token][1]:
                    inside.append(token)
                token += 1
            found.append(range(inside[0], inside[-1] + 1) if inside else None)
        return found


def _spans(text: str, contents: Sequence[str], around: Sequence[str]) -> list[Span] | None:
    """Where each content is in a text that has `around` before, between and after them; None if it has not.

    A template may strip a content.
    """
    found: list[Span] = []
    place = len(around[0])
    if not text.startswith(around[0]):
        return None
    for content, after in zip(contents, around[1:], strict=True):
        ends = [place + len(one) for one in (content, content.strip()) if text.startswith(one + after, place)]
        if not ends:
            return None
        found.append((place, ends[0]))
        place = ends[0] + len(after)
    return found if place == len(text) else None
