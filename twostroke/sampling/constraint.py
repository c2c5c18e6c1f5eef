"""What a token may be, beyond what the model thinks of it: where grammars take hold."""

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """Follows one choice token by token.

    What it allows is a function of the tokens so far and of nothing else: neither the batch nor a preemption (after
    which another one is led through the same tokens) may change it.
    """

    def mask(self) -> np.ndarray:
        """Which ids may come next: bool [n]. Ids from n on may not."""
        ...

    def advance(self, token: int) -> None:
        """Take a token. Raises InvalidRequest if nothing can follow any more."""
        ...

    @property
    def finished(self) -> bool:
        """Nothing but the end may come now."""
        ...


ConstraintFactory = Callable[[], Constraint]  # a fresh one for every choice, and for every candidate of one
