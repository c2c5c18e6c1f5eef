"""Constraints on sampled tokens, such as grammars."""

from collections.abc import Callable
from typing import Protocol

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
