"""The queries of a lane's last tokens, gathered step by step."""

import numpy as np

from twostroke.kv.attention import NO_QUERIES, Queries


class LastQueries:
    """Keeps as many as were asked for, however long the lane goes on."""

    def __init__(self, most: int, windows: tuple[int | None, ...], guesses: int = 0) -> None:
        """`most` are asked for; so many `guesses` may be taken back after their queries came."""
        self._most, self._windows = most, windows
        self._room = most + guesses if most else 0
        self._parts: list[np.ndarray] = []  # [layers, rows, Hq, D] each

    def wanted(self, count: int, todo: int) -> int:
        """How many of the last of the next `count` tokens are among the last that are asked for, with `todo` to go."""
        return max(0, count - max(0, todo - self._room))

    def add(self, rows: np.ndarray) -> None:
        """Those of the tokens entered last. A copy is kept, for a step's own holds everybody's."""
        self._parts.append(rows.copy())
        while sum(part.shape[1] for part in self._parts[1:]) >= self._room:
            del self._parts[0]

    def all(self, wrong: int = 0) -> Queries:
        """What there is, without those of `wrong` guesses at the end."""
        if not self._parts:
            return NO_QUERIES
        found = Queries(np.concatenate(self._parts, 1), self._windows).without_last(wrong)
        return Queries(found.rows[:, -self._most :], self._windows)
