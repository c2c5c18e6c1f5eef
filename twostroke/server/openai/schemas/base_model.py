"""The base of all bodies. It decides about fields that a body does not declare.

A field that asks for nothing is accepted in silence: `user`, or `use_beam_search: false`. One that this server lacks
and that would change the answer is refused. Any other gets a warning, or is refused if the server is strict.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, NamedTuple

from fastapi import Request as HttpRequest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from twostroke.server.errors import ApiError
from twostroke.server.http.call_log import call_log

MAX_WARNINGS = 20  # warnings of one body
Neutral = dict[str, tuple[Any, ...]]  # fields, with the values that ask for nothing


def whole_number(value: Any) -> Any:
    """A number without a fraction as an integer: 16.0 is 16 in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def listed(value: Any) -> Any:
    """One text as a list of one."""
    return [value] if isinstance(value, str) else value


TokenId = Annotated[int, Field(ge=0, lt=1 << 31), BeforeValidator(whole_number)]


class UndeclaredField(NamedTuple):
    """A field that a body does not declare: where it is, and the model that lacks it."""

    path: str
    name: str
    value: Any
    model: "type[LenientModel]"

    @property
    def field(self) -> str:
        """The field's path, as an error message shows it."""
        name = self.name if self.name.isprintable() else ascii(self.name)
        return self.path + (name if len(name) <= 60 else f"{name[:60]}...")


class LenientModel(BaseModel):
    """Reads null as a field that is left out, as OpenAI's clients send it, and remembers what it does not declare."""

    model_config = ConfigDict(strict=True, extra="allow")
    ALIASES: ClassVar[Mapping[str, str]] = {}  # other servers' names of declared fields
    HARMLESS: ClassVar[frozenset[str]] = frozenset()  # fields that change no answer
    WITHOUT_EFFECT: ClassVar[Neutral] = {}  # fields that get a warning unless their value asks for nothing
    UNSUPPORTED: ClassVar[Neutral] = {}  # fields that are refused unless their value asks for nothing

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        for alias in cls.ALIASES.keys() & given.keys():
            set_alias(given, cls.ALIASES[alias], given.pop(alias), alias)
        return cls.translated(given)

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The fields with other servers' forms rewritten. Raises ValueError, whose text begins with a field's name."""
        return given

    def undeclared(self, path: str = "") -> Iterator[UndeclaredField]:
        """The fields that this model and those within it do not declare."""
        for name, value in (self.model_extra or {}).items():
            yield UndeclaredField(path, name, value, type(self))
        for name, value in vars(self).items():  # of the fields
            if isinstance(value, LenientModel):
                yield from value.undeclared(f"{path}{name}.")
            elif isinstance(value, list):
                for index, one in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                    if isinstance(one, LenientModel):
                        yield from one.undeclared(f"{path}{name}[{index}].")

    @classmethod
    def names(cls) -> list[str]:
        """All names that a field of this model may have."""
        fields = (field.alias or name for name, field in cls.model_fields.items())
        return [*fields, *cls.ALIASES, *cls.HARMLESS, *cls.WITHOUT_EFFECT, *cls.UNSUPPORTED]

    @classmethod
    def why_refused(cls, name: str) -> str | None:
        """Why a field that is unknown must not be passed over; None if a warning is enough."""
        return None


def set_alias(given: dict[str, Any], name: str, value: Any, alias: str) -> None:
    """Give a field what was sent under another name. Raises ValueError if it was sent as well, and differs."""
    if given.setdefault(name, value) != value:
        raise ValueError(f"{alias}: the same as {name}, which is also given: leave one of them out")


def warn_of_fields(http: HttpRequest, body: LenientModel, *more: str) -> None:
    """Tell the caller of each field of the body that has no effect, and `more`. Call it before the work begins.

    Raises ApiError for a field that must not be passed over: one that this server lacks and that would change the
    answer, an unknown one that looks like a constraint, and with --strict-fields every field without effect.
    """
    strict = http.app.state.engine.settings.strict_fields
    told = [*undeclared_warnings(body, strict), *more]
    if strict and more:
        raise ApiError(400, more[0], param=more[0].split()[0])
    call_log(http.scope).warn(told)


def undeclared_warnings(body: LenientModel, strict: bool) -> list[str]:
    """A sentence for each field without effect. Raises ApiError for one that must not be passed over."""
    told: list[str] = []
    for one in body.undeclared():
        model = one.model
        if one.name in model.HARMLESS:
            continue
        if one.name in model.UNSUPPORTED:
            if one.value not in model.UNSUPPORTED[one.name]:
                raise ApiError(400, f"{one.field} is not supported here: leave it out", param=one.field)
            continue
        if one.name in model.WITHOUT_EFFECT:
            if one.value in model.WITHOUT_EFFECT[one.name]:
                continue
            message, refused = f"{one.field} has no effect here", None
        else:
            refused = model.why_refused(one.name)
            message = f"{one.field} is unknown{'' if refused is None else f', {refused}'}{_suggestion(one)}"
        if refused is not None or strict:
            raise ApiError(400, message, param=one.field)
        told.append(message)
    if len(told) > MAX_WARNINGS:
        told[MAX_WARNINGS:] = [f"{len(told) - MAX_WARNINGS} more fields are unknown"]
    return told


def _suggestion(one: UndeclaredField) -> str:
    close = get_close_matches(one.name[:60], one.model.names(), 1, 0.7)
    return f": did you mean {close[0]}?" if close else ""
