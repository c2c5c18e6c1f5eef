"""Where a model of the native backend gets its weights from: the whole of each matrix, or a rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from twostroke.backends.interface import Weights
from twostroke.backends.native.library import Team
from twostroke.backends.native.weights import Part, Table, vector
from twostroke.models.config import ModelConfig
from twostroke.ranks.shares import Share


class Parts(Protocol):
    """The weights of one process. All ranks ask for the same in the same order.

    Attributes:
        share: which part it has.
        handle: the native ranks that its model joins; None for a single process.
    """

    share: Share
    handle: int | None

    def matrix(self, name: str) -> Part:
        """A matrix of the model, or this rank's rows of it."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """A norm, a bias or a router, float32."""
        ...

    def table(self, team: Team, name: str) -> Table | None:
        """An embedding that is only looked up; None if rank 0 looks it up."""
        ...

    def table_format(self, table: Table | None) -> int:
        """The format of its rows."""
        ...

    def largest(self, values: Sequence[float]) -> list[float]:
        """For each value the largest of all ranks."""
        ...


class Alone:
    """A single process: the checkpoint's tensors. Implements `Parts`."""

    handle: int | None = None

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights, self.share = config, weights, Share(0, 1)

    def matrix(self, name: str) -> Part:
        return Part.whole(self.weights(name))

    def vector(self, name: str) -> np.ndarray:
        return vector(self.weights(name))

    def table(self, team: Team, name: str) -> Table | None:
        return Table(team, self.weights(name))

    def table_format(self, table: Table | None) -> int:
        return 0 if table is None else table.format

    def largest(self, values: Sequence[float]) -> list[float]:
        return list(values)
