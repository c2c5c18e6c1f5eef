"""Bounds and multiples of numbers, of which every text that is generated is right for every validator.

A validator reads a number of a text as a double or as an exact integer. So texts are limited to digits that a double
keeps, and bounds to integers that a double holds.
"""

import math
from fractions import Fraction
from typing import Any

MAX_INTEGER = 10**18  # so that the number of digits has an end
MAX_FRACTION = 10**14
DIGITS = 15  # of a decimal number that a double keeps
MAX_DECIMALS = 9
EXACT = 2**53
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def number_rules(schema: dict[str, Any], *, integers: bool) -> dict[str, Any]:
    """The keywords for numbers of a schema, narrowed to numbers whose texts are read exactly.

    Args:
        schema: its bounds and `multipleOf` are finite numbers.
        integers: whether other numbers are excluded by `type`.
    """
    given: dict[str, Any] = {keyword: schema[keyword] for keyword in BOUNDS if keyword in schema}
    step = fraction(schema["multipleOf"]) if "multipleOf" in schema else None
    largest = max((abs(fraction(bound)) for bound in given.values()), default=Fraction(0))
    if integers or (step is not None and step.denominator == 1) or largest > MAX_FRACTION:
        limit = MAX_INTEGER if step is None else EXACT  # validators divide doubles
        low = [math.ceil(fraction(given["minimum"]))] if "minimum" in given else []
        low += [math.floor(fraction(given["exclusiveMinimum"])) + 1] if "exclusiveMinimum" in given else []
        high = [math.floor(fraction(given["maximum"]))] if "maximum" in given else []
        high += [math.ceil(fraction(given["exclusiveMaximum"])) - 1] if "exclusiveMaximum" in given else []
        rules = {"minimum": _double(max([*low, -limit]), math.inf), "maximum": _double(min([*high, limit]), -math.inf)}
        return rules if integers and step is None else rules | {"multipleOf": step.numerator if step else 1}
    if step is not None:
        return {"minimum": -MAX_FRACTION, "maximum": MAX_FRACTION} | given | {"multipleOf": float(step)}
    decimals = min(MAX_DECIMALS, DIGITS - len(str(int(largest))))
    return given | {"multipleOf": float(Fraction(1, 10**decimals))} if given else {}


def is_exact_step(value: float) -> bool:
    """Whether validators divide by a step without rounding: it is whole, or a binary fraction."""
    denominator = fraction(value).denominator
    return denominator & (denominator - 1) == 0 and denominator <= 1 << 10


def fraction(value: float) -> Fraction:
    """A number as its text says it: 0.1 is a tenth."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _double(value: int, towards: float) -> int:
    """The nearest integer in a direction that a double holds."""
    if abs(value) <= EXACT or abs(value) > MAX_INTEGER:
        return value
    near = int(float(value))
    return near if near == value or (near > value) == (towards > 0) else int(math.nextafter(float(value), towards))
