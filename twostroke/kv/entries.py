"""The parts of a value besides its pages."""

from dataclasses import dataclass

import numpy as np

from twostroke.backends.interface import LazyLogits
from twostroke.kv.provenance import Stretch


@dataclass(frozen=True)
class Tail:
    """The start of the next stroke: the logits after the last entry, or one token that is not entered yet.

    Attributes:
        model: identity of the model that computed the logits or sampled the token.
        row: the logits after the last entry, one row, computed when read. It holds a hidden state, a few KB instead of
            0.6 MB of logits at a vocabulary of 152,000.
        pending: the last sampled token, if it is not entered yet.
    """

    model: str
    row: LazyLogits | None = None
    pending: int | None = None

    @property
    def logits(self) -> np.ndarray | None:
        """Logits [vocab] float32, computed at each read; None for a tail with a pending token."""
        return None if self.row is None else self.row.read()[0]

    @property
    def nbytes(self) -> int:
        """Bytes held by `row`."""
        return 0 if self.row is None else self.row.nbytes


@dataclass(frozen=True)
class Contents:
    """A value without its K and V, as a file describes it.

    Attributes:
        table: [P, 4] int32 spans, over the pages of a pool or of a file.
        tokens: [n] int32, the token of each entry.
        stretches: provenance of the entries.
        next_position: the position of the next entry.
        tail: the start of the next stroke.
    """

    table: np.ndarray
    tokens: np.ndarray
    stretches: tuple[Stretch, ...]
    next_position: int
    tail: Tail | None
