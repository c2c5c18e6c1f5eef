"""The content of messages: a text, or parts of text and of named contexts, which become one text."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, PrivateAttr, model_validator

from twostroke.models.checkpoints.chat_passages import PASSAGE
from twostroke.server.errors import ApiError
from twostroke.server.openai.schemas.base_model import LenientModel, UndeclaredField

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"  # of a context
CONTEXT = "context"  # the type of a part that is a context's text


def _text(value: Any) -> Any:
    """Content as a text: parts are joined. Those of contexts are empty until their texts are known."""
    return "".join(map(_text_of, value)) if isinstance(value, list) else value


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == CONTEXT:
        if not isinstance(name := part.get("name"), str) or not re.fullmatch(NAME, name):
            raise ValueError("a part of type context must have the name of one")
        return ""
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"a part of content must be of type text or context, not {kind!r:.40}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind} must have a text")
    return text


Text = Annotated[str, BeforeValidator(_text)]


def joined(contents: Iterable[str | list[Any]], between: str = "") -> str | list[Any]:
    """Contents as one, with a text between those that are not empty: a text if all are, else parts."""
    made: list[Any] = []
    for one in filter(None, contents):
        made += [between] if made and between else []
        made += [one] if isinstance(one, str) else one
    if all(isinstance(one, str) for one in made):
        return "".join(made)
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in made]


class ContentPart(LenientModel):
    """A part of content. Its text is read by `_text`; this class knows which fields it may have."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"}
    )
    type: Any = None
    text: Any = None
    refusal: Any = None


class ContextPart(LenientModel):
    """A part that is the text of a context."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: Any = None
    name: Any = None


class MessageWithParts(LenientModel):
    """A message whose content may have parts; they become one text, but their fields are remembered."""

    content: Text | None = None
    _parts: list[ContentPart | ContextPart] = PrivateAttr(default_factory=list)
    _pieces: list[str] | None = PrivateAttr(default=None)  # texts around and of contexts, in turn, once these are known

    @model_validator(mode="wrap")
    @classmethod
    def _remember(cls, data: Any, handler: Callable[[Any], Self]) -> Self:
        message = handler(data)
        parts = data.get("content") if isinstance(data, dict) else None  # pyright: ignore
        if isinstance(parts, list):
            message._parts = [  # pyright: ignore
                (ContextPart if part["type"] == CONTEXT else ContentPart).model_validate(part)  # pyright: ignore
                for part in parts  # pyright: ignore
            ]
        return message

    @property
    def contexts(self) -> list[str]:
        """The names of the contexts that are parts of the content, in order."""
        return [part.name for part in self._parts if isinstance(part, ContextPart)]

    def with_contexts(self, texts: Mapping[str, str]) -> Self:
        """The message with the texts of its contexts, by name."""
        if not self.contexts:
            return self
        pieces = [""]
        for part in self._parts:
            if isinstance(part, ContextPart):
                pieces += [texts[part.name], ""]
            else:
                pieces[-1] += _text_of(part.model_dump())
        made = self.model_copy(update={"content": "".join(pieces)})
        made._pieces = pieces
        return made

    @property
    def passages(self) -> list[str]:
        """The texts of its contexts, for the places that `marked` has."""
        return [] if self._pieces is None else self._pieces[1::2]

    def marked(self, content: str) -> str:
        """The content with marks in place of contexts. Raises ApiError if their texts are not known."""
        if self.contexts and self._pieces is None:
            raise ApiError(400, "a part of type context is not supported here: put its text", param="messages")
        return content if self._pieces is None else PASSAGE.join(self._pieces[::2])

    def as_text(self) -> Self:
        """The message with one text as its content."""
        made = self.model_copy()
        made._parts, made._pieces = [], None
        return made

    def undeclared(self, path: str = "") -> Iterator[UndeclaredField]:
        yield from super().undeclared(path)
        for index, part in enumerate(self._parts):
            yield from part.undeclared(f"{path}content[{index}].")
