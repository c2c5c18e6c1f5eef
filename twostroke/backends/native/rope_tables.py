"""How a native model turns queries and keys: cos and sin by position."""

import numpy as np

from twostroke.models.config import Attention, ModelConfig, QueryGrowth
from twostroke.models.rope import Rope, amplitudes, frequencies


class RopeTables:
    """The tables of a model's layers, which grow with the positions that its passes have."""

    def __init__(self, config: ModelConfig) -> None:
        # each RoPE with its head_dim, and how queries grow with their positions, once
        self.turned = list(dict.fromkeys(one for attention in config.attentions for one in _turned(attention)))
        # angles of a row, those of the largest heads
        self.half_dim = max((one.head_dim for one in config.attentions), default=0) // 2
        self._tables = np.empty((0, 0)), np.empty((0, 0))

    def numbers(self, attention: Attention) -> list[int]:
        """Which of the tables turn a layer's keys, and its queries."""
        return [self.turned.index(one) for one in _turned(attention)]

    def of_positions(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of at least `count` positions, by amplitude and growth: [turned, positions, half_dim] each."""
        if self._tables[0].shape[1] < count:
            positions = np.arange(max(1024, 1 << (count - 1).bit_length()), dtype=np.float32)[:, None]
            angles = np.zeros((len(self.turned), len(positions), self.half_dim), np.float32)
            for angle, (rope, dim, _) in zip(angles, self.turned, strict=True):
                angle[:, : dim // 2] = positions * frequencies(rope, dim)
            turns = tuple(of(angles, dtype=np.float64).astype(np.float32) for of in (np.cos, np.sin))
            for i, (rope, dim, growth) in enumerate(self.turned):
                size = amplitudes(rope, dim) if growth is None else amplitudes(rope, dim) * growth.factors(positions)
                for turn in turns:
                    turn[i, :, : dim // 2] *= size
            self._tables = turns[0], turns[1]
        return self._tables


def _turned(attention: Attention) -> list[tuple[Rope, int, QueryGrowth | None]]:
    """How keys and queries are turned."""
    return [(attention.rope, attention.head_dim, growth) for growth in (None, attention.growth)]
