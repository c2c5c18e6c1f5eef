"""The pieces of a batch's attention: groups of sequences, and tiles of their pages with masks.

All decode rows of a batch are one group. A prefill chunk is cut into blocks of rows, each up to the last key that it
attends to. A tile is of fixed size, so its scores, K and V stay in cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from twostroke.backends.interface import PAGE, POSITION, START, STOP, RaggedBatch

TILE_KEYS = 512  # keys per tile
BLOCK_ROWS = 128  # rows of a prefill chunk that are processed together


@dataclass
class SequenceGroup:
    """Sequences with the same number of rows, longest first, so that a tile covers only the first `count` of them.

    The rows are the last entries of their tables, or `behind` others follow, which they attend to as well.
    """

    rows: torch.Tensor  # [G * T] indices into the batch
    num_rows: int  # T
    tables: list[np.ndarray]  # [P, 3 + groups] spans each
    biases: list[np.ndarray | None]  # `RaggedBatch.biases`, one for each table; empty if none has any
    behind: int | None = None  # with attention in both directions, the number of entries behind its rows
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
    orders: np.ndarray  # [count, P * page_size], entries of the sequence before each slot


def groups_of(batch: RaggedBatch[torch.Tensor], device: torch.device, both_ways: bool) -> Iterator[SequenceGroup]:
    """One group for each block of `BLOCK_ROWS` rows of a prefill chunk, and one of all decode rows; on `device`."""
    decoding: list[tuple[np.ndarray, int, np.ndarray | None]] = []
    biases = batch.biases or [None] * len(batch.tables)
    for table, bias, start, stop in zip(batch.tables, biases, batch.row_starts[:-1], batch.row_starts[1:], strict=True):
        if stop - start == 1:
            decoding.append((table, start, bias))
            continue
        for first in range(start, stop, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, stop)
            behind = stop - last if both_ways else None
            cut = table if both_ways else _without_last(table, stop - last)
            yield SequenceGroup(torch.arange(first, last, device=device), last - first, [cut], _any([bias]), behind)
    if decoding:
        decoding.sort(key=lambda one: len(one[0]), reverse=True)
        tables, rows, own = zip(*decoding, strict=True)
        yield SequenceGroup(torch.tensor(rows, device=device), 1, list(tables), _any(own))


def _any(biases: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    return [] if all(one is None for one in biases) else list(biases)


def _without_last(table: np.ndarray, count: int) -> np.ndarray:
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
        orders = np.zeros((len(tables), width, page_size), np.int64)
        for g, table in enumerate(tables):
            part = table[first : first + width]
            pages[g, : len(part)] = part[:, PAGE + layers]
            order = _orders(table, page_size)[first : first + len(part)]
            orders[g, : len(part)] = order
            mask[g, :, : len(part)] = _visible(table, part, order, group, window)
        if not mask.any():
            continue
        mask = mask.reshape(len(tables), group.num_rows, -1)
        yield PageTile(
            len(tables),
            torch.from_numpy(pages).to(device),
            None if mask.all() else torch.from_numpy(mask).to(device),
            orders.reshape(len(tables), -1),
        )


def _orders(table: np.ndarray, page_size: int) -> np.ndarray:
    """Number of the sequence's entries before each slot, [P, page_size]."""
    return (np.cumsum(table[:, STOP] - table[:, START]) - table[:, STOP])[:, None] + np.arange(page_size)


def _visible(
    table: np.ndarray, part: np.ndarray, order: np.ndarray, group: SequenceGroup, window: int | None
) -> np.ndarray:
    """Mask [rows, P, page_size]: whether a group's rows attend to each slot of a part of a table's spans, [P,
    3 + groups], of which `order` is that of `_orders`."""
    rows, behind = group.num_rows, group.behind
    ends = np.cumsum(table[:, STOP] - table[:, START])
    part, slot = part[:, :, None], np.arange(order.shape[1])
    row_order = ends[-1] - (behind or 0) - rows + np.arange(rows)
    filled = (slot >= part[:, START]) & (slot < part[:, STOP])
    visible = filled & ((behind is not None) | (order <= row_order[:, None, None]))
    if window is not None:
        row_ends = np.searchsorted(ends, row_order, side="right")
        row_position = table[row_ends, POSITION] + row_order - (ends - table[:, STOP] + table[:, START])[row_ends]
        away = row_position[:, None, None] - (part[:, POSITION] - part[:, START] + slot)
        visible &= (away < window) & ((behind is None) | (away > -window))
    return visible


def tile_bias(biases: Sequence[np.ndarray | None], tile: PageTile, layer: int) -> np.ndarray:
    """What each KV head of a layer adds to scores of a tile's slots: [count, KV heads, P * page_size] float32."""
    heads = next(one.shape[1] for one in biases if one is not None)
    added = np.zeros((tile.count, heads, tile.orders.shape[1]), np.float32)
    for one, bias, order in zip(added, biases, tile.orders, strict=False):
        if bias is not None:
            known = (order >= 0) & (order < bias.shape[2])
            one[:, known] = bias[layer][:, order[known]]
    return added
