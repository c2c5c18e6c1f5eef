"""Collects the query vectors of a lane's last tokens, step by step."""

import numpy as np

from twostroke.kv.attention import NO_QUERIES, Queries


class LastQueries:
    """Keeps only the requested number of queries, for any number of steps."""

    def __init__(self, most: int, windows: tuple[int | None, ...], guesses: int = 0) -> None:
        """`most` queries are requested; up to `guesses` of the last may be removed after they were added."""
        self._most, self._windows = most, windows
        self._room = most + guesses if most else 0
        self._parts: list[np.ndarray] = []  # [layers, rows, Hq, D] each

    def wanted(self, count: int, todo: int) -> int:
        """Number of the next `count` tokens whose queries are kept; `todo` tokens, these included, are left."""
        return max(0, count - max(0, todo - self._room))

    def add(self, rows: np.ndarray) -> None:
        """Add queries [layers, rows, Hq, D] of the last entered tokens. Copied: the step's array holds all lanes."""
        self._parts.append(rows.copy())
        while sum(part.shape[1] for part in self._parts[1:]) >= self._room:
            del self._parts[0]

    def all(self, wrong: int = 0) -> Queries:
        """The queries kept, without those of the last `wrong` guesses."""
        if not self._parts:
            return NO_QUERIES
        found = Queries(np.concatenate(self._parts, 1), self._windows).without_last(wrong)
        return Queries(found.rows[:, -self._most :], self._windows)
