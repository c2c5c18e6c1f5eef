"""Parameters: any value is either accepted or named in an InvalidRequest."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.errors import InvalidRequest
from twostroke.sampling.params import SamplingParams

ODD = ["1", True, [1], {}, 1j, math.nan, math.inf, -math.inf, -(10**5000), np.bool_(True), object]
NUMBERS = [None, 10**400, *ODD]
WHOLE = [1.0, 1.5, *ODD]
BAD: dict[str, list[Any]] = {
    "max_tokens": [-1, 1 << 63, 10**400, *WHOLE],
    "temperature": [-0.1, -1e-300, *NUMBERS],
    "top_k": [-1, None, 1 << 63, 10**400, *WHOLE],
    "top_p": [0, 0.0, -0.1, 1.0001, 2, *NUMBERS],
    "min_p": [-0.1, 1.0001, *NUMBERS],
    "repetition_penalty": [0, 0.0, -1.0, 5e-324, *NUMBERS],
    "presence_penalty": [1e300, *NUMBERS],
    "frequency_penalty": [-1e300, *NUMBERS],
    "logit_bias": [
        None,
        "1",
        5,
        [1, 2],
        [(1, 2.0)],
        *({key: 1.0} for key in ("1", True, None, 1.0, -1, (1,))),
        *({1: bias} for bias in ("1", True, None, math.nan, math.inf, 1e39, 10**400, [1])),
    ],
    "seed": ["1", True, 1.0, math.nan, [1], 1 << 65, -(1 << 64), 10**5000],
    "stop": ["", None, 5, b"stop", [""], ["a", ""], [None], [1], [b"a"], [["a"]], {"a": 1}, (s for s in "ab")],
    "stop_token_ids": [None, 5, "12", b"12", [-1], ["1"], [True], [1.0], [None], {1: 2}],
    "include_stop_str_in_output": [None, 0, "true", []],
    "skip_special_tokens": [None, 0, "true", []],
    "allowed_token_ids": [None, 5, "12", [-1], ["1"], [True], [1.0], {1: 2}],
    "bad_words": ["", "ab", None, 5, [""], ["a", ""], [None], [1], [["a"]], {"a": 1}],
    "min_tokens": [-1, 257, None, *WHOLE],
    "ignore_eos": [None, 0, 1, "true", "", []],
    "logprobs": [-1, 1001, *WHOLE],
    "prompt_logprobs": [-1, 1001, *WHOLE],
    "n": [0, -1, 1025, None, *WHOLE],
    "constraint": ["1", True, 1.0, [1], {}, b"json"],
    "reader": ["1", True, 1.0, [1], {}, b"json"],
}
GOOD: dict[str, list[Any]] = {
    "max_tokens": [0, 1, None, (1 << 63) - 1, np.int64(3)],
    "temperature": [0, 0.0, 1, 1e-300, 1e30, np.float32(0.5)],
    "top_k": [0, 1, (1 << 63) - 1, np.int32(3)],
    "top_p": [1e-300, 0.5, 1, 1.0],
    "min_p": [0, 1, 0.5],
    "repetition_penalty": [1e-30, 1, 1e30],
    "presence_penalty": [-2, 2.0, 0],
    "frequency_penalty": [-2, 2.0, 0],
    "logit_bias": [{}, {0: -100, 5: 100.0}, {1: -math.inf}, {np.int64(2): np.float32(1)}],
    "seed": [None, 0, -1, -(1 << 63), (1 << 64) - 1],
    "stop": ["a", [], ["a", "bc"], ("\n\n",), {"a"}],
    "stop_token_ids": [[], [0, 10**9], (1,), frozenset({2}), [np.int64(2)]],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "allowed_token_ids": [[], [0, 10**9], (1,)],
    "bad_words": [[], ["a", " bc"], ("x",)],
    "min_tokens": [0, 256],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 1000],
    "prompt_logprobs": [None, 0, 1000],
    "n": [1, 1024],
    "constraint": [None, len],
    "reader": [None, len],
}
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    cases = [(name, value) for name in FIELDS for value in table[name]]
    return [pytest.param(name, value, id=f"{name}-{number}") for number, (name, value) in enumerate(cases)]


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_good_edges_are_taken(name: str, value: Any) -> None:
    taken = getattr(SamplingParams(**{name: value}), name)
    if isinstance(taken, tuple):
        assert set(taken) == set(value)
    else:
        assert taken == value
        assert type(taken) in (bool, int, float, dict, type(len), type(None)), "numpy's types are left behind"


junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
junk = junk | st.lists(junk, max_size=2) | st.dictionaries(st.none() | st.integers() | st.text(max_size=2), junk)


@given(st.dictionaries(st.sampled_from(FIELDS), junk, max_size=3))
@settings(deadline=None)
def test_nothing_but_invalid_request_is_ever_raised(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**fields)
    except InvalidRequest:
        return
    assert dataclasses.replace(params) == params


def test_min_tokens_may_reach_max_tokens_and_no_further() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
    with pytest.raises(InvalidRequest, match=r"^min_tokens must be from 0 to max_tokens, not 4"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_what_the_caller_changes_later_does_not_matter() -> None:
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)  # pyright: ignore[reportArgumentType]
    bias[2], stop[0] = math.nan, ""
    assert params == SamplingParams(logit_bias={1: 2.0}, stop=("a",))


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {3: 1.0, 100: 1.0}}, {"stop_token_ids": (100, 3)}, {"allowed_token_ids": (100,)}]
)
def test_ids_are_checked_against_a_vocabulary(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    params.check_vocabulary(101)
    with pytest.raises(InvalidRequest, match=f"^{next(iter(fields))} .* 100$"):
        params.check_vocabulary(100)
    SamplingParams().check_vocabulary(1)


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "logprobs": 3, "stop": ("a",)}, False),
        *(({name: 0.5}, True) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        ({"logit_bias": {0: 1}}, True),
        ({"min_tokens": 1}, True),
        ({"constraint": len}, True),
    ],
)
def test_whether_logits_are_shaped(fields: dict[str, Any], shapes: bool) -> None:
    assert SamplingParams(**fields).shapes_logits is shapes
