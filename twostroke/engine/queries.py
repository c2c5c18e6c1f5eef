"""Collects what a lane's last tokens hand out, step by step: their query vectors, their hidden states."""

import numpy as np

from twostroke.kv.attention import NO_QUERIES, Queries


class LastRows:
    """Keeps only the requested number of rows, for any number of steps."""

    def __init__(self, most: int, guesses: int = 0) -> None:
        """`most` rows are requested; up to `guesses` of the last may be removed after they were added."""
        self._most = most
        self._room = most + guesses if most else 0
        self._parts: list[np.ndarray] = []  # [layers, rows, ...] each

    def wanted(self, count: int, todo: int) -> int:
        """Number of the next `count` tokens whose rows are kept; `todo` tokens, these included, are left."""
        return max(0, count - max(0, todo - self._room))

    def add(self, rows: np.ndarray) -> None:
        """Add rows [layers, rows, ...] of the last entered tokens. Copied: the step's array holds all lanes."""
        self._parts.append(rows.copy())
        while sum(part.shape[1] for part in self._parts[1:]) >= self._room:
            del self._parts[0]

    def rows(self, wrong: int = 0) -> np.ndarray | None:
        """The rows kept, without those of the last `wrong` guesses; None if no step has added any."""
        if not self._parts:
            return None
        found = np.concatenate(self._parts, 1)
        return found[:, max(0, found.shape[1] - wrong - self._most) : found.shape[1] - wrong]


class LastQueries(LastRows):
    """Query vectors, [layers, rows, Hq, D]."""

    def __init__(self, most: int, windows: tuple[int | None, ...], guesses: int = 0) -> None:
        super().__init__(most, guesses)
        self._windows = windows

    def all(self, wrong: int = 0) -> Queries:
        """The queries kept, without those of the last `wrong` guesses."""
        rows = self.rows(wrong)
        return NO_QUERIES if rows is None else Queries(rows, self._windows)
