"""The pieces of a batch's attention: groups of sequences, and tiles of their pages with masks.

All decode rows of a batch are one group. A prefill chunk is cut into blocks of rows, each up to the last key that it
attends to. A tile is of fixed size, so its scores, K and V stay in cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from twostroke.backends.interface import PAGE, POSITION, START, STOP, RaggedBatch

TILE_KEYS = 512  # keys per tile
BLOCK_ROWS = 128  # rows of a prefill chunk that are processed together


@dataclass
class SequenceGroup:
    """Sequences with the same number of rows, longest first, so that a tile covers only the first `count` of them.

    The rows are the last entries of their tables.
    """

    rows: torch.Tensor  # [G * T] indices into the batch
    num_rows: int  # T
    tables: list[np.ndarray]  # [P, 3 + groups] spans each
    _tiles: dict[tuple[int, int | None], list["PageTile"]] = field(
        default_factory=dict
    )  # by group of layers and window

    def tiles(self, page_size: int, layers: int, window: int | None) -> list["PageTile"]:
        """Its tiles, for attention of a group of layers to positions > own - `window`; made once for each."""
        if (layers, window) not in self._tiles:
            self._tiles[layers, window] = list(_cut(self, page_size, layers, window))
        return self._tiles[layers, window]


@dataclass(frozen=True)
class PageTile:
    """A run of pages of the first `count` sequences of a group, with its mask."""

    count: int
    pages: torch.Tensor  # [count, P]
    mask: torch.Tensor | None  # [count, T, P * page_size], None if every row attends to every key


def groups_of(batch: RaggedBatch[torch.Tensor], device: torch.device) -> Iterator[SequenceGroup]:
    """One group for each block of `BLOCK_ROWS` rows of a prefill chunk, and one of all decode rows; on `device`."""
    decoding: list[tuple[np.ndarray, int]] = []
    for table, start, stop in zip(batch.tables, batch.row_starts[:-1], batch.row_starts[1:], strict=True):
        if stop - start == 1:
            decoding.append((table, start))
            continue
        for first in range(start, stop, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, stop)
            yield SequenceGroup(
                torch.arange(first, last, device=device), last - first, [_without_last(table, stop - last)]
            )
    if decoding:
        decoding.sort(key=lambda pair: len(pair[0]), reverse=True)
        yield SequenceGroup(
            torch.tensor([row for _, row in decoding], device=device), 1, [table for table, _ in decoding]
        )


def _without_last(table: np.ndarray, count: int) -> np.ndarray:
    """The table without its last `count` entries."""
    ends = np.cumsum(table[:, STOP] - table[:, START])
    last = int(np.searchsorted(ends, ends[-1] - count))
    cut = table[: last + 1].copy()
    cut[-1, STOP] -= ends[last] - (ends[-1] - count)
    return cut


def _cut(group: SequenceGroup, page_size: int, layers: int, window: int | None) -> Iterator[PageTile]:
    """Cut the tables into tiles with their masks; tiles without any visible key are left out."""
    device = group.rows.device
    per_tile = max(1, TILE_KEYS // page_size)
    for first in range(0, len(group.tables[0]), per_tile):
        tables = [table for table in group.tables if len(table) > first]
        width = max(min(len(table) - first, per_tile) for table in tables)
        pages = np.zeros((len(tables), width), np.int64)
        mask = np.zeros((len(tables), group.num_rows, width, page_size), bool)
        for g, table in enumerate(tables):
            part = table[first : first + width]
            pages[g, : len(part)] = part[:, PAGE + layers]
            mask[g, :, : len(part)] = _visible(table, first, len(part), group.num_rows, page_size, window)
        if not mask.any():
            continue
        mask = mask.reshape(len(tables), group.num_rows, -1)
        yield PageTile(
            len(tables),
            torch.from_numpy(pages).to(device),
            None if mask.all() else torch.from_numpy(mask).to(device),
        )


def _visible(table: np.ndarray, first: int, count: int, rows: int, page_size: int, window: int | None) -> np.ndarray:
    """Mask [rows, count, page_size]: whether the table's last `rows` entries attend to each slot of these pages."""
    ends = np.cumsum(table[:, STOP] - table[:, START])
    part, slot = table[first : first + count, :, None], np.arange(page_size)
    order = (ends - table[:, STOP])[first : first + count, None] + slot  # number of entries before the slot
    row_order = ends[-1] - rows + np.arange(rows)
    filled = (slot >= part[:, START]) & (slot < part[:, STOP])
    visible = filled & (order <= row_order[:, None, None])
    if window is not None:
        row_ends = np.searchsorted(ends, row_order, side="right")
        row_position = table[row_ends, POSITION] + row_order - (ends - table[:, STOP] + table[:, START])[row_ends]
        visible &= part[:, POSITION] - part[:, START] + slot > (row_position - window)[:, None, None]
    return visible
