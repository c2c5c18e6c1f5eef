"""What there is to a value besides its pages."""

from dataclasses import dataclass

import numpy as np

from twostroke.kv.provenance import Stretch


@dataclass(frozen=True)
class Tail:
    """What the next stroke starts from: the logits after the last entry, or one token that is not entered yet.

    Attributes:
        model: id of the weights that computed the logits or sampled the token.
        logits: [vocab] float32, after the last entry.
        pending: the token sampled last.
    """

    model: str
    logits: np.ndarray | None = None
    pending: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the logits."""
        return 0 if self.logits is None else self.logits.nbytes


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
