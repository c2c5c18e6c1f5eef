"""A value outside any pool: what is moved to another one, or written to a file."""

from dataclasses import dataclass

import numpy as np

from twostroke.kv.geometry import Geometry
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


@dataclass(frozen=True)
class Contents:
    """All there is to a value.

    Attributes:
        spans: [P, 4] int32 as in a span table; page ids mean nothing here, but slots stay as they were, so that
            attention walks a copy exactly as it walks the original.
        tokens: [n] int32.
        entries: K and V, [layers, 2, n, Hkv, D].
    """

    geometry: Geometry
    page_size: int
    spans: np.ndarray
    tokens: np.ndarray
    stretches: tuple[Stretch, ...]
    next_position: int
    tail: Tail | None
    entries: np.ndarray
