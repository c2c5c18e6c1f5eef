"""What a technique is: parameters, a citation, and a program."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from twostroke.checkpoints.tokenizer import ChatTokens, Tokenizer
from twostroke.engine.strokes import Program
from twostroke.errors import InvalidRequest

METHODS: dict[str, type[Method]] = {}


class Prompt(list[int]):
    """A prompt's token ids, and what a technique may ask about them."""

    def __init__(self, tokens: Iterable[int], tokenizer: Tokenizer) -> None:
        """Tokens that `encode_chat` made know where the turn lies."""
        super().__init__(tokens)
        self._asked, self._tokenizer = tokens, tokenizer

    @property
    def turn(self) -> range | None:
        """Where the last user's text lies; None where the prompt is no chat."""
        return self._asked.turn if isinstance(self._asked, ChatTokens) else None

    def encode(self, text: str) -> list[int]:
        """The ids of a text in the middle of a prompt."""
        return self._tokenizer.encode(text, add_bos=False) if text else []


@dataclasses.dataclass(frozen=True)
class Method(ABC):
    """A technique. Subclasses are frozen dataclasses whose fields are its parameters.

    `class Repeat(Method, name="repeat")` enrols it: the engine, the CLI and the shared tests know it by that name.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name
        METHODS[name] = cls

    @property
    def companions(self) -> tuple[str, ...]:
        """The roles of the models that it takes besides the engine's own ("student", "draft")."""
        return ()

    @abstractmethod
    def program(self, prompt: Prompt) -> Program:
        """The strokes for one prompt. It must be deterministic: a preempted request runs it again."""


def method(name: str, **parameters: Any) -> Method:
    """A method by name. Raises InvalidRequest naming an unknown method or parameter."""
    if name not in METHODS:
        raise InvalidRequest(f"there is no method {name!r}; there are {', '.join(sorted(METHODS))}")
    known = {field.name: field for field in dataclasses.fields(METHODS[name])}
    for parameter in parameters:
        if parameter not in known:
            raise InvalidRequest(f"method {name} has no parameter {parameter!r}; it has {', '.join(known) or 'none'}")
    return METHODS[name](**parameters)


def require_int(owner: Method, field: str, least: int, most: int | None = None) -> None:
    """Raise InvalidRequest unless the field is an int of at least `least` (and at most `most`)."""
    value = getattr(owner, field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidRequest(f"{owner.name}: {field} must be an integer {wanted}, not {value!r}")


def require_number(owner: Method, field: str, least: float, most: float = math.inf) -> None:
    """Raise InvalidRequest unless the field is a number from `least` to `most`."""
    value = getattr(owner, field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        wanted = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise InvalidRequest(f"{owner.name}: {field} must be a number {wanted}, not {value!r}")


def require_bool(owner: Method, field: str) -> None:
    """Raise InvalidRequest unless the field is True or False."""
    if not isinstance(value := getattr(owner, field), bool):
        raise InvalidRequest(f"{owner.name}: {field} must be true or false, not {value!r}")


def require_choice(owner: Method, field: str, choices: tuple[str, ...]) -> None:
    """Raise InvalidRequest unless the field is one of `choices`."""
    if (value := getattr(owner, field)) not in choices:
        raise InvalidRequest(f"{owner.name}: {field} must be one of {', '.join(choices)}, not {value!r}")
