"""Where K and V of newly entered tokens belong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.backends.interface import StateStep
from twostroke.kv.pool import PagePool
from twostroke.kv.spans import NO_PAGE


@dataclass(frozen=True)
class SlotMapping:
    """The positions, frames and slots where K and V of newly entered tokens belong."""

    # [2 + groups, n] int64: positions, slots, and frames of the pool's memory, one for each group of layers; -1 where a
    # group keeps nothing
    rows: np.ndarray
    states: StateStep | None = None  # what the tokens read and write of states, if the model has any

    @classmethod
    def of(
        cls, pool: PagePool, held: Sequence[int], first: int, slot: int, count: int, states: StateStep | None
    ) -> "SlotMapping":
        """Places of `count` tokens from position `first` on, the first of which has a slot in the first of its pages.

        `held`: the pages in turn, one for each group of layers, and again.
        """
        groups = pool.num_groups
        if count == 1:  # fast path of decoding: array operations cost more than the rest of this
            frames = [[pool.frame(page)] for page in held[:groups]]
            return cls(np.array([[first], [slot], *frames], np.int64), states)
        # Tokens that do not continue the last page begin a new one.
        order, size = np.arange(count) + slot, pool.page_size
        frames = pool.frames_of(held).reshape(-1, groups)
        if states is not None:
            frames = np.where(np.reshape(held, frames.shape) == NO_PAGE, NO_PAGE, frames)
        return cls(np.stack([np.arange(first, first + count), order % size, *frames[order // size].T]), states)

    @property
    def positions(self) -> np.ndarray:
        return self.rows[0]

    @property
    def slots(self) -> np.ndarray:
        return self.rows[1]

    @property
    def frames(self) -> np.ndarray:
        """[groups, n]"""
        return self.rows[2:]
