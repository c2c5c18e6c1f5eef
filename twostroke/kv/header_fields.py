"""Checks of a header's JSON, which may come from anyone: each raises InvalidHeader and names the field."""

import json
from typing import Any

import numpy as np

MAX_INTEGER = 2**31 - 1  # largest integer in a header
MAX_NAME_LENGTH = 1000


class InvalidHeader(ValueError):
    """The header is invalid; the message names the field."""


def parse_json(text: bytes) -> Any:
    """Parse untrusted JSON. Raises InvalidHeader."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidHeader("it is not JSON") from None


def require(right: bool | np.bool_, what: str) -> None:
    """Raise Invalid with the message `what` unless `right`."""
    if not right:
        raise InvalidHeader(what)


def object_of(value: Any, what: str, *names: str) -> dict[str, Any]:
    require(isinstance(value, dict) and set(value) == set(names), f"{what} does not have the fields {', '.join(names)}")
    return value


def integer_of(value: Any, what: str, minimum: int = 0) -> int:
    require(
        type(value) is int and minimum <= value <= MAX_INTEGER,
        f"{what} is not an integer from {minimum} to {MAX_INTEGER}",
    )
    return value


def integers_of(value: Any, what: str) -> np.ndarray:
    """[n] int32 from a list of integers >= 0."""
    right = isinstance(value, list) and set(map(type, value)) <= {int}
    right = right and (not value or (min(value) >= 0 and max(value) <= MAX_INTEGER))
    require(right, f"{what} are not integers from 0 to {MAX_INTEGER}")
    return np.array(value, np.int32)


def name_of(value: Any, what: str) -> str:
    require(isinstance(value, str) and len(value) <= MAX_NAME_LENGTH, f"{what} is not a name")
    return value
