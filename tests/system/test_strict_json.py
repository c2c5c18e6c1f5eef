"""JSON without NaN and infinity."""

import json
import math

import pytest

from twostroke.system import strict_json


def test_what_json_lacks_becomes_null() -> None:
    value = {"a": [1.5, math.nan, {"b": (math.inf, -math.inf, None, True, "NaN")}], "c": math.nan}
    assert json.loads(strict_json.dumps(value)) == {"a": [1.5, None, {"b": [None, None, None, True, "NaN"]}], "c": None}


@pytest.mark.parametrize("value", [None, [], {"a": [1, 2.5, "x"]}, "é", 1e308])
def test_other_values_are_written_as_ever(value: object) -> None:
    assert strict_json.dumps(value, indent=1) == json.dumps(value, indent=1)


def test_a_cycle_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises((ValueError, RecursionError)):
        strict_json.dumps(cycle)
