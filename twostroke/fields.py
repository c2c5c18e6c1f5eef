"""Rules of parameters, each declared once, where the parameter is.

    @dataclass(frozen=True)
    class Nucleus(Checked):
        top_p: float = number(1.0, above=0, most=1, help="Keep the likeliest tokens up to p.")

Construction checks every field that has a rule, and raises InvalidRequest naming the first one that breaks it. The
options of the command line and the schemas of the server are made from the same rules.
"""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal

from twostroke.errors import InvalidRequest

LARGE = 1e30  # sums and products of float32 numbers beyond it may overflow
MAX_INTEGER = (1 << 63) - 1  # integer: a larger one fits in no word, and far larger ones in no float
UNSPOKEN = (LARGE, -LARGE, MAX_INTEGER)  # bounds that are named only where a value is beyond them
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}


@dataclass(frozen=True)
class Rule:
    """The rule of one parameter: its type, its range, and a sentence of help."""

    kind: type  # int, float, bool, str, tuple (several values), dict, or object (anything, subject to `test`)
    help: str = ""  # one sentence for people
    # least, most: bounds that a number may have; of a text, bounds of its length
    least: float | None = None
    most: float | None = None
    # above, below: bounds that a number may not have
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()  # the texts there are to choose from
    optional: bool = False  # None is allowed
    # keys, each: rules of a dict's keys, and of its values or a tuple's items
    keys: "Rule | None" = None
    each: "Rule | None" = None
    test: Callable[[Any], bool] | None = None  # a condition besides; it is called with a value of the right kind
    words: str | None = None  # completes "NAME must be ..."; None derives it from the other attributes
    # "bytes" for sizes and "directory" for paths, which are also written as texts ("2GiB", "~/kv")
    unit: Literal["", "bytes", "directory"] = ""
    unset: str = ""  # what None stands for, in words
    or_object: bool = False  # Python code may pass an object in place of the text, such as a Path

    def accepts(self, value: Any) -> bool:
        """Whether a value keeps the rule. Numbers of numpy are numbers; True and False are not."""
        if value is None:
            return self.optional
        if self.or_object and not isinstance(value, str):
            return not isinstance(value, bool | int | float | bytes)
        return self._is_of_kind(value) and self._in_range(value) and (self.test is None or self.test(value))

    def _is_of_kind(self, value: Any) -> bool:
        if self.kind in (int, float):
            wanted = Integral if self.kind is int else Real
            return issubclass(type(value), wanted) and not isinstance(value, bool)
        if self.kind is tuple:
            return isinstance(value, list | tuple | Set) and all(map(self.each.accepts, value) if self.each else ())
        if self.kind is dict:
            return (
                isinstance(value, Mapping)
                and all(map(self.keys.accepts, value) if self.keys else ())
                and all(map(self.each.accepts, value.values()) if self.each else ())
            )
        return isinstance(value, self.kind)

    def _in_range(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind not in (int, float, str):
            return True
        measured = len(value) if self.kind is str else value
        return (
            (self.least is None or measured >= self.least)
            and (self.most is None or measured <= self.most)
            and (self.above is None or measured > self.above)
            and (self.below is None or measured < self.below)
            and measured == measured  # nan is in no range
        )

    def plain(self, value: Any) -> Any:
        """An accepted value in Python's own types, and a copy of what the caller may change later."""
        if value is None or self.kind is object:
            return value
        if self.kind is tuple:
            return tuple(map(self.each.plain, value)) if self.each else tuple(value)
        if self.kind is dict:
            keys, each = self.keys or Rule(object), self.each or Rule(object)
            return {keys.plain(key): each.plain(one) for key, one in value.items()}
        return self.kind(value)

    @property
    def wanted(self) -> str:
        """Completes "NAME must be ..."."""
        if self.words is not None:
            words = self.words
        elif self.choices:
            words = f"one of {', '.join(self.choices)}"
        elif self.bounds:
            words = f"{_NOUNS.get(self.kind, 'a value')} {self.bounds}"
        else:
            words = "a finite number" if self.kind is float else _NOUNS.get(self.kind, "a value")
        return f"{words}, or None" if self.optional else words

    def wanted_of(self, value: Any) -> str:
        """The same, for a value that is refused: it may be beyond a bound that is not spoken of."""
        most = self.most if self.most in UNSPOKEN else math.inf
        huge = isinstance(value, int | float) and most < abs(value) < math.inf
        return f"{self.wanted}, and no larger than {most}" if huge else self.wanted

    @property
    def bounds(self) -> str:
        """The range in words, such as `from 0 to 1`; empty where there is none to speak of."""
        least, most = (None if bound in UNSPOKEN else bound for bound in (self.least, self.most))
        if self.kind is str:
            return "" if least is None else "that is not empty" if least == 1 else f"of at least {least:g} characters"
        if least is not None and most is not None:
            return f"from {_figure(least)} to {_figure(most)}"
        parts = [f"of at least {_figure(least)}"] if least is not None else []
        parts += [f"above {_figure(self.above)}"] if self.above is not None else []
        parts += [f"at most {_figure(most)}"] if most is not None else []
        parts += [f"below {_figure(self.below)}"] if self.below is not None else []
        return " and ".join(parts)


def _figure(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


class Checked:
    """Base of dataclasses whose fields have rules: each is checked on construction (InvalidRequest)."""

    def __post_init__(self) -> None:
        for name, rule in rules(type(self)).items():
            self.check(name, rule)

    def check(self, name: str, rule: Rule) -> None:
        """Raise InvalidRequest unless the field keeps the rule; it is then of Python's own types."""
        value = getattr(self, name)
        if not rule.accepts(value):
            self.require(name, False, rule.wanted_of(value))
        object.__setattr__(self, name, rule.plain(value))

    def require(self, name: str, fine: bool, wanted: str) -> None:
        """Raise InvalidRequest naming the field unless `fine`: for conditions that involve several fields."""
        if not fine:
            raise InvalidRequest(f"{self.checked_as}{name} must be {wanted}, not {_shown(getattr(self, name))}")

    @property
    def checked_as(self) -> str:
        """The beginning of error messages."""
        return ""


@cache
def rules(declaring: type) -> dict[str, Rule]:
    """The rule of each field that has one. A subclass that changes a field's default keeps the field's rule."""
    found: dict[str, Rule] = {}
    for base in reversed(declaring.__mro__):
        for field in base.__dict__.get("__dataclass_fields__", {}).values():
            if "rule" in field.metadata:
                found[field.name] = field.metadata["rule"]
    return found


def declare(default: Any, rule: Rule) -> Any:
    """A dataclass field with a rule."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"rule": rule})
    return dataclasses.field(default=default, metadata={"rule": rule})


def like(declaring: type, name: str, default: Any = ..., help: str | None = None) -> Any:
    """A field with the rule and the default of another dataclass's field, unless another default or help is given."""
    rule = rules(declaring)[name]
    default = getattr(declaring, name) if default is ... else default
    return declare(default, dataclasses.replace(rule, help=rule.help if help is None else help))


def check_arguments(declaring: type, arguments: Mapping[str, Any]) -> None:
    """Check a function's arguments by a dataclass's rules. Raises InvalidRequest naming the first that breaks one."""
    for name, rule in rules(declaring).items():
        if not rule.accepts(arguments[name]):
            raise InvalidRequest(f"{name} must be {rule.wanted_of(arguments[name])}, not {_shown(arguments[name])}")


def integer(
    default: int | None,
    *,
    least: int | None = None,
    most: int = MAX_INTEGER,
    optional: bool = False,
    unset: str = "",
    help: str = "",
) -> Any:
    """A field that is an int; a default of None makes it optional, and `unset` says what None stands for."""
    return declare(default, Rule(int, help, least, most, optional=optional or default is None, unset=unset))


def size(default: int | None, *, least: int = 0, unset: str = "", help: str = "") -> Any:
    """A field that is a number of bytes."""
    return declare(default, Rule(int, help, least, MAX_INTEGER, optional=default is None, unit="bytes", unset=unset))


def number(
    default: float | None,
    *,
    least: float | None = None,
    most: float | None = LARGE,
    above: float | None = None,
    below: float | None = None,
    help: str = "",
) -> Any:
    """A field that is a finite number, unless `most` is None; a default of None makes it optional."""
    least = -LARGE if least is None and above is None else least
    return declare(default, Rule(float, help, least, most, above, below, optional=default is None))


def flag(default: bool, *, help: str = "") -> Any:
    """A field that is True or False."""
    return declare(default, Rule(bool, help))


def text(default: str | None, *, choices: tuple[str, ...] = (), least: int | None = None, help: str = "") -> Any:
    """A field that is a text: one of `choices`, or of at least `least` characters."""
    return declare(default, Rule(str, help, least, choices=choices, optional=default is None))


def parsed_value(text: str) -> int | float | bool | str:
    """An int, a float, true or false; otherwise the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # thousands of digits
        return "so huge a number"
