"""Methods under the names that evaluations compare them by."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.methods import METHODS, Method, method_of

# Techniques that papers name, and which are settings of a method here.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "teacher": ("plain", {}),  # beside methods whose student decodes
    "repeat": ("repeat", {"keep": "all"}),  # full repetition, P||P
    "ptdo": ("repeat", {"keep": "last", "sinks": 0}),
    "ptdo+sinks": ("repeat", {"keep": "last", "sinks": 4}),
    "streaming": ("drop", {"by": "window"}),  # StreamingLLM
    "h2o": ("drop", {"by": "attention", "sinks": 0}),
    "snapkv": ("snap", {}),
    "snapkv-by-head": ("snap", {"per": "head", "pool": "mean"}),
}


@dataclass(frozen=True)
class Contender:
    """A method with its parameters, and what it is called here."""

    name: str
    method: Method

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "method": self.method.name, "parameters": dataclasses.asdict(self.method)}


IN_ENTRIES = {"snap": "budget", "rkv": "budget", "drop": "window"}  # methods that count entries, and their parameter


def at_budgets(name: str, shares: Sequence[float], length: int | None, /, **parameters: Any) -> list[Contender]:
    """A method once for each share of the prompt that it is to keep; once if it keeps all, or if `parameters` say it.

    `length`: tokens of a prompt, for methods that count entries. Raises InvalidRequest if they do not know it.
    """
    base = contender(name, **parameters).method
    field = IN_ENTRIES.get(base.name)
    if {"ratio", field} & parameters.keys():
        return [contender(name, **parameters)]
    if shares and field is None and base.by_head and hasattr(base, "ratio"):
        return [contender(name, **parameters, ratio=share) for share in shares]
    if not shares or field is None:
        return [contender(name, **parameters)]
    if length is None:
        raise InvalidRequest(f"{name} counts entries: give it {field} and no budgets, or take a task with a length")
    sinks = getattr(base, "sinks", 0) if field == "window" else 0
    return [contender(name, **parameters, **{field: max(1, int(share * length) - sinks)}) for share in shares]


def contender(name: str, /, **parameters: Any) -> Contender:
    """A contender by the name of a setting or a method; `parameters` replace its own.

    `contender("ptdo", sinks=8)` is called "ptdo:sinks=8". Raises InvalidRequest for an unknown name.
    """
    if name not in SETTINGS and name not in METHODS:
        known = sorted(METHODS.keys() | SETTINGS.keys())
        raise InvalidRequest(f"there is no method {name!r:.60}; there are {', '.join(known)}")
    base, own = SETTINGS.get(name, (name, {}))
    spelled = ",".join(f"{key}={value}" for key, value in parameters.items())
    return Contender(f"{name}:{spelled}" if spelled else name, method_of(base, own | parameters))
