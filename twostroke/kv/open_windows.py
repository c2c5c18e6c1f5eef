"""The windows of a writer's table: what no further entry attends to."""

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.kv.pool import PagePool
from twostroke.models.layer_groups import EntryKind


class OpenWindow:
    """The groups of layers of one window and one kind of entries, in a writer's table.

    Attributes:
        groups: their indexes; columns: their columns.
        kind: the kind of entries.
        first: number of leading spans whose pages are given back.
    """

    def __init__(self, pool: PagePool, size: int, kind: EntryKind) -> None:
        groups = enumerate(pool.geometry.groups)
        self.groups = [g for g, group in groups if (group.window, group.kind) == (size, kind)]
        self.columns = [PAGE + g for g in self.groups]
        self.first, self.kind, self._size = 0, kind, size

    def limit(self, first_query: int) -> int:
        """The last position whose entries no query from a position on reads. Of rows, a snapshot comes behind it."""
        return first_query // self._size * self._size - 1 if self.kind == "rows" else first_query - self._size

    def passed(self, table: np.ndarray, first_query: int) -> int:
        """Number of leading spans to which no query from a position on attends. The last span is none of them."""
        count, limit = self.first, self.limit(first_query)
        while count < len(table) - 1:
            start, stop, position = table[count, :PAGE].tolist()
            if position + stop - start - 1 > limit:
                break
            count += 1
        return count


def window_kinds(pool: PagePool) -> list[tuple[int, EntryKind]]:
    """The different windows of a pool's groups of layers, and what is in them."""
    return list(dict.fromkeys((one.window, one.kind) for one in pool.geometry.groups if one.window is not None))
