"""Bounds and multiples of numbers, and which of them texts can be compared with exactly.

A validator reads a number of a text as a double or as an exact integer. So a text is limited to digits that a double
keeps, and bounds are integers that a double holds.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

LARGEST = 10**18  # of integers; also their number of digits has an end
LARGEST_FRACTION = 10**14
DIGITS = 15  # of a decimal number that a double keeps
MOST_DECIMALS = 9
EXACT = 2**53


@dataclass
class Numbers:
    """What a conjunction says about numbers."""

    low: Fraction | None = None
    high: Fraction | None = None
    above: bool = False  # the lowest number is excluded
    below: bool = False
    multiples: list[Fraction] = field(default_factory=list)

    def at_least(self, bound: Any, exclusive: bool) -> None:
        """Tighten the lower bound."""
        bound = _fraction(bound)
        if self.low is None or (bound, exclusive) > (self.low, self.above):
            self.low, self.above = bound, exclusive

    def at_most(self, bound: Any, exclusive: bool) -> None:
        """Tighten the upper bound."""
        bound = _fraction(bound)
        if self.high is None or (bound, not exclusive) < (self.high, not self.below):
            self.high, self.below = bound, exclusive

    def multiple_of(self, step: Any) -> None:
        """Allow multiples only."""
        self.multiples.append(_fraction(step))

    @property
    def empty(self) -> bool:
        """Whether the bounds leave nothing."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.above or self.below))

    @property
    def unbounded(self) -> bool:
        """Whether every number is allowed."""
        return self.low is None and self.high is None and not self.multiples

    def apart(self, other: "Numbers") -> bool:
        """Whether no number is within the bounds of both."""
        joined = Numbers(self.low, self.high, self.above, self.below)
        if other.low is not None:
            joined.at_least(other.low, other.above)
        if other.high is not None:
            joined.at_most(other.high, other.below)
        return joined.empty

    def holds(self, value: float) -> bool:
        """Whether a number is allowed."""
        exact = _fraction(value)
        if self.low is not None and (exact < self.low or (self.above and exact == self.low)):
            return False
        if self.high is not None and (exact > self.high or (self.below and exact == self.high)):
            return False
        return all((exact / step).denominator == 1 for step in self.multiples)

    @property
    def inexact_multiple(self) -> bool:
        """Whether a validator's division may be inexact: the step is no integer, nor a binary fraction."""
        return any(step.denominator & (step.denominator - 1) or step.denominator > 1 << 10 for step in self.multiples)

    def integers(self) -> dict[str, Any] | None:
        """The schema of the allowed integers, None if there are none."""
        high = EXACT if self.multiples else LARGEST  # validators divide doubles
        low = -high
        if self.low is not None:
            low = max(low, _double_from(math.floor(self.low) + 1 if self.above else math.ceil(self.low), up=True))
        if self.high is not None:
            high = min(high, _double_from(math.ceil(self.high) - 1 if self.below else math.floor(self.high), up=False))
        step = math.lcm(*(one.numerator for one in self.multiples)) if self.multiples else 1
        if low > high or -(-low // step) > high // step or step > EXACT:
            return None
        return {"type": "integer", "minimum": low, "maximum": high} | ({"multipleOf": step} if step > 1 else {})

    def fractions(self) -> dict[str, Any] | None:
        """The schema of the allowed numbers, integers among them; None where only integers can be written."""
        if self.unbounded:
            return {"type": "number"}
        if any(step.denominator == 1 for step in self.multiples):
            return None
        if self.multiples and (self.low is None or self.high is None):
            bounded = Numbers(self.low, self.high, self.above, self.below, self.multiples)
            bounded.at_least(-LARGEST_FRACTION, False)
            bounded.at_most(LARGEST_FRACTION, False)
            return bounded.fractions()
        schema: dict[str, Any] = {"type": "number"}
        largest = max((abs(bound) for bound in (self.low, self.high) if bound is not None), default=Fraction(0))
        if largest > LARGEST_FRACTION:
            return None
        decimals = min(MOST_DECIMALS, DIGITS - len(str(int(largest))))
        for bound, open_, closed, out in (
            (self.low, "exclusiveMinimum", "minimum", self.above),
            (self.high, "exclusiveMaximum", "maximum", self.below),
        ):
            if bound is not None:
                schema[open_ if out else closed] = float(bound)
        if self.multiples:
            step = self.multiples[0]
            for other in self.multiples[1:]:
                step = Fraction(
                    math.lcm(step.numerator, other.numerator), math.gcd(step.denominator, other.denominator)
                )
        else:
            step = Fraction(1, 10**decimals)
        low = (
            -math.inf
            if self.low is None
            else math.floor(self.low / step) + 1
            if self.above
            else math.ceil(self.low / step)
        )
        high = (
            math.inf
            if self.high is None
            else math.ceil(self.high / step) - 1
            if self.below
            else math.floor(self.high / step)
        )
        return schema | {"multipleOf": float(step)} if low <= high else None


def _fraction(value: Any) -> Fraction:
    """A number as its text says it: 0.1 is a tenth."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _double_from(value: int, up: bool) -> int:
    """The nearest integer in a direction that a double holds."""
    if abs(value) <= EXACT or abs(value) > LARGEST:
        return value
    near = int(float(value))
    if (near >= value) if up else (near <= value):
        return near
    return int(math.nextafter(float(value), math.inf if up else -math.inf))
