"""Parameters declared once: accepted values, messages for others, and the users of declarations."""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from twostroke.errors import InvalidRequest
from twostroke.fields import Checked, Rule, declare, flag, integer, like, number, rules, text
from twostroke.sampling.params import SamplingParams

BEYOND = 1 << 63  # the least integer that no field takes


@dataclass(frozen=True)
class Knobs(Checked):
    count: int = integer(3, least=1, most=5)
    least: int = integer(3, least=1)
    share: float = number(0.5, above=0, most=1)
    anything: float = number(0.0)
    loud: bool = flag(False)
    name: str = text("a", least=1)
    kind: str = text("x", choices=("x", "y"))
    maybe: int | None = integer(None, least=2)
    several: tuple[int, ...] = declare((), Rule(tuple, each=Rule(int, least=0), words="ids"))
    free: object = None


@dataclass(frozen=True)
class Louder(Knobs):
    count: int = 5  # another default, the same rule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count must be an integer from 1 to 5, not 0"),
        ({"count": True}, "count must be an integer from 1 to 5, not True"),
        ({"count": None}, "count must be an integer from 1 to 5, not None"),
        ({"count": 2.0}, "count must be an integer from 1 to 5, not 2.0"),
        ({"least": 0}, "least must be an integer of at least 1, not 0"),
        ({"least": BEYOND}, f"least must be an integer of at least 1, and no larger than {BEYOND - 1}, not {BEYOND}"),
        ({"share": 0}, "share must be a number above 0 and at most 1, not 0"),
        ({"anything": math.inf}, "anything must be a finite number, not inf"),
        ({"anything": 1e31}, "anything must be a finite number, and no larger than 1e+30, not 1e+31"),
        ({"anything": math.nan}, "anything must be a finite number, not nan"),
        ({"loud": 1}, "loud must be true or false, not 1"),
        ({"name": ""}, "name must be a text that is not empty, not ''"),
        ({"kind": "z"}, "kind must be one of x, y, not 'z'"),
        ({"maybe": 1}, "maybe must be an integer of at least 2, or None, not 1"),
        ({"several": [1, -1]}, "several must be ids, not [1, -1]"),
        ({"several": "12"}, "several must be ids, not '12'"),
    ],
)
@pytest.mark.parametrize("kind", [Knobs, Louder])
def test_what_breaks_a_rule_is_named(kind: type[Knobs], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kind(**changes)
    assert str(caught.value) == message


def test_values_become_pythons_own() -> None:
    made = Knobs(count=np.int64(2), share=np.float32(0.5), several=[np.int32(7)], free={})  # pyright: ignore
    assert made == Knobs(count=2, share=0.5, several=(7,), free={})
    assert [type(value) for value in (made.count, made.share, made.several[0])] == [int, float, int]


def test_a_subclass_keeps_the_rules_of_fields_that_it_changes() -> None:
    assert Louder().count == 5
    assert rules(Louder) == rules(Knobs)


def test_like_takes_the_rule_and_the_default() -> None:
    @dataclass(frozen=True)
    class Other(Checked):
        temperature: float = like(SamplingParams, "temperature", help="Of answers.")
        most: int | None = like(SamplingParams, "max_tokens", None)

    assert Other() == Other(SamplingParams.temperature, None)
    with pytest.raises(InvalidRequest, match="most must be an integer of at least 0, or None, not -1"):
        Other(most=-1)
    assert rules(Other)["temperature"].help == "Of answers."


def test_every_sampling_parameter_is_declared() -> None:
    assert list(rules(SamplingParams)) == [field.name for field in fields(SamplingParams)]
    assert all(rule.help for name, rule in rules(SamplingParams).items() if name not in ("constraint", "reader"))
