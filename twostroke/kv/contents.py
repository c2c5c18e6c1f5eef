"""What there is to a value besides its pages."""

from dataclasses import dataclass

import numpy as np

from twostroke.backends.interface import LazyLogits
from twostroke.kv.provenance import Stretch


@dataclass(frozen=True)
class Tail:
    """What the next stroke starts from: the logits after the last entry, or one token that is not entered yet.

    Attributes:
        model: identity of the model that computed the logits or sampled the token.
        row: the logits after the last entry, one row, computed when they are read: what is held is a hidden state, some
            KB where logits are 0.6 MB at a vocabulary of 152,000.
        pending: the token sampled last.
    """

    model: str
    row: LazyLogits | None = None
    pending: int | None = None

    @property
    def logits(self) -> np.ndarray | None:
        """[vocab] float32, computed now; None of a tail with a pending token."""
        return None if self.row is None else self.row.read()[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return 0 if self.row is None else self.row.nbytes


@dataclass(frozen=True)
class Contents:
    """A value without its K and V: what a file says of it.

    Attributes:
        table: [P, 4] int32 spans, over the pages of a pool or of a file.
        tokens: [n] int32, of each entry.
        stretches: where the entries come from.
        next_position: the position that the next entry takes.
        tail: what the next stroke starts from.
    """

    table: np.ndarray
    tokens: np.ndarray
    stretches: tuple[Stretch, ...]
    next_position: int
    tail: Tail | None
