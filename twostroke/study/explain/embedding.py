"""The embedding: the row of numbers that stands for each token before the first layer."""

from dataclasses import dataclass

import numpy as np

FIRST_VALUES = 6


@dataclass(frozen=True)
class Embedding:
    """The rows of a prompt's tokens.

    Attributes:
        shape: tokens, hidden size.
        values: the first values of each token's row, [n, FIRST_VALUES] float32.
    """

    shape: tuple[int, int]
    values: np.ndarray


class EmbeddingCollector:
    """Collects first values, tile by tile, of the states that a pass hands out."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._hidden = 0

    def add(self, states: np.ndarray) -> None:
        """`states`: [layers + 1, rows, hidden]; the first of them is the embedding."""
        self._hidden = states.shape[2]
        self._parts.append(states[0, :, :FIRST_VALUES].copy())

    def result(self) -> Embedding:
        values = np.concatenate(self._parts)
        return Embedding((len(values), self._hidden), values)
