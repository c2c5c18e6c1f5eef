"""Constraints on sampled tokens, such as grammars."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np


class Constraint(Protocol):
    """Follows one choice token by token.

    The mask must depend only on the tokens so far, not on the batch. After a preemption a new constraint is advanced
    through the same tokens and must give the same masks.
    """

    def mask(self) -> np.ndarray:
        """Mask of the ids allowed next: bool [n]. Ids >= n are not allowed."""
        ...

    def advance(self, token: int) -> None:
        """Advance by a token. Raises InvalidRequest if no token can follow."""
        ...

    @property
    def finished(self) -> bool:
        """Whether only the end is allowed now."""
        ...


ConstraintFactory = Callable[[], Constraint]  # called for every choice, and for every candidate of a choice


@runtime_checkable
class DescribedConstraint(Protocol):
    """A factory that others can make again from what it tells of itself."""

    @property
    def description(self) -> Mapping[str, str | None]:
        """What it was made of."""
        ...

    def __call__(self) -> Constraint: ...
