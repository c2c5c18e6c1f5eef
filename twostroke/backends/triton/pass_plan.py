"""The plan of a pass as integers: rows, span tables, and the division of attention into work items.

The host makes one array of int32 of it, and one copy takes it to the device. Where a captured graph runs the pass, each
part has the room of the graph's shape, and what is not used is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP, RaggedBatch
from twostroke.models.config import Attention

LOG2_E = 1.4426950408889634
FEW_ROWS, MANY_ROWS = 16, 128  # of a tile of queries: tokens times query heads of a KV head
FIELDS = 8  # of a work item: row, tokens, first entry, entries before the row, tiles from and to, part, parts a token
MAX_PARTS = 4096  # rows times tiles of keys that are added by a second kernel
PROGRAMS = 264  # that keep a GPU busy: two for each of 132 multiprocessors


class HeadShape(NamedTuple):
    """What attention's work is divided by. Layers in which it is the same share their work items."""

    window: int | None
    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, attention: Attention) -> "HeadShape":
        return cls(attention.window, attention.num_heads, *attention.kv_shape)


@dataclass(frozen=True)
class PassShape:
    """Sizes of a pass. A graph is captured for a shape, and serves every batch that fits into it."""

    rows: int  # of the batch
    groups: int  # groups of layers whose entries share pages
    spans: int  # rows of all span tables
    tall: tuple[int, ...]  # rows of a tile of queries, for each `HeadShape`, as the others
    items: tuple[int, ...]  # work items of attention
    joined: tuple[int, ...]  # rows whose parts are added by a second kernel

    @property
    def sizes(self) -> list[int]:
        """Lengths of the parts of the integer array: ids, positions, cells, spans, starts, work, joined rows."""
        sizes = [self.rows, self.rows, self.groups * self.rows, (PAGE + self.groups) * self.spans, self.spans]
        for items, joined in zip(self.items, self.joined, strict=True):
            sizes += [items * FIELDS, joined * 3]
        return sizes

    def padded(self, rows: int) -> "PassShape":
        """The shape with room to grow, of a batch padded to `rows` rows."""
        return PassShape(
            rows,
            self.groups,
            power_of_two(self.spans, 256),
            self.tall,
            tuple(power_of_two(count, 64) for count in self.items),
            tuple(rows if count else 0 for count in self.joined),
        )


def power_of_two(count: int, least: int = 1) -> int:
    """The least power of two that is not smaller, and at least `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


@dataclass(frozen=True)
class PassPlan:
    """A batch as arrays of int32, in the order of `PassShape.sizes`; `entries` is the length of all tables together."""

    shape: PassShape
    arrays: list[np.ndarray]
    entries: int

    def packed(self, shape: PassShape) -> np.ndarray:
        """One array, each part padded to the room that `shape` gives it."""
        sizes = shape.sizes
        packed = np.zeros(sum(sizes), np.int32)
        start = 0
        for array, size in zip(self.arrays, sizes, strict=True):
            if array.ndim == 2:  # cells, [groups, rows]; padding rows have none
                packed[start : start + size] = -1
                packed[start : start + size].reshape(shape.groups, -1)[:, : array.shape[1]] = array
            else:
                packed[start : start + len(array)] = array
            start += size
        return packed


def tall_of(head_dim: int) -> int:
    """Rows of a tile of queries where many tokens share one.

    Wide heads: as many as fit a multiprocessor's memory. Narrow ones: so few that three programs fit its registers.
    """
    if head_dim > 256:
        return MANY_ROWS // 4
    return MANY_ROWS if 64 < head_dim <= 128 else MANY_ROWS // 2


def keys_of(head_dim: int) -> int:
    """Keys of a tile, by the width of heads alone: two programs share a multiprocessor's memory."""
    return 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32


def plan(batch: RaggedBatch[np.ndarray], page_size: int, shapes: Sequence[HeadShape]) -> PassPlan:
    """The work of a batch, for each of the model's distinct shapes of heads."""
    spans = batch.tables[0] if len(batch.tables) == 1 else np.concatenate(batch.tables, dtype=np.int32)
    lengths = spans[:, STOP] - spans[:, START]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    counts = np.fromiter((len(table) for table in batch.tables), np.int64, len(batch.tables))
    last = np.cumsum(counts)
    sequence_ends = ends[last - 1]
    sequence_starts = np.concatenate(([0], sequence_ends[:-1]))
    arrays = [
        np.asarray(batch.token_ids),
        np.asarray(batch.positions),
        batch.pages * page_size + batch.slots,
        spans.reshape(-1),
        starts,
    ]
    made: list[tuple[int, int, int]] = []
    tiles: dict[int, np.ndarray] = {}
    for window, heads, kv_heads, dim in shapes:
        # Tall tiles read K and V once for many tokens; for single tokens they would be mostly padding.
        many = batch.num_rows > 2 * len(batch.tables) or heads > FEW_ROWS * kv_heads
        tall, keys = tall_of(dim) if many else FEW_ROWS, keys_of(dim)
        each = tall // (heads // kv_heads)
        if each not in tiles:
            tiles[each] = _queries(batch, sequence_starts, sequence_ends, each)
        first = None if window is None else _first(batch, tiles[each], spans, starts, window) // keys
        work, rows = _items(tiles[each], kv_heads, keys, first)
        arrays += [work.reshape(-1), rows.reshape(-1)]
        made.append((tall, len(work), len(rows)))
    tall, items, joined = zip(*made, strict=True)
    return PassPlan(PassShape(batch.num_rows, len(batch.pages), len(spans), tall, items, joined), arrays, int(ends[-1]))


def _queries(batch: RaggedBatch[np.ndarray], starts: np.ndarray, ends: np.ndarray, per_tile: int) -> np.ndarray:
    """Tiles of queries, [tiles, 5] int64: row, tokens, first entry of the sequence, entries before it, sequence."""
    rows = np.asarray(batch.row_starts, np.int64)
    counts = np.diff(rows)
    tiles = -(-counts // per_tile)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    nth = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    done = nth * per_tile
    tokens = np.minimum(per_tile, counts[sequence] - done)
    order = (ends - starts - counts)[sequence] + done
    return np.stack([rows[sequence] + done, tokens, starts[sequence], order, sequence], 1)


def _first(
    batch: RaggedBatch[np.ndarray], queries: np.ndarray, spans: np.ndarray, starts: np.ndarray, window: int
) -> np.ndarray:
    """The first entry of its sequence that a tile of queries sees through a window: [tiles] int64.

    Tiles of keys before it are wholly masked, and leaving them out changes no bit.
    """
    first = np.zeros(len(queries), np.int64)
    last_positions = spans[:, POSITION] + spans[:, STOP] - spans[:, START] - 1
    bounds = np.concatenate(([0], np.cumsum([len(table) for table in batch.tables])))
    for i, (row, tokens, base, _, sequence) in enumerate(queries.tolist()):
        least = int(batch.positions[row : row + tokens].min()) - window
        own = slice(bounds[sequence], bounds[sequence + 1])
        seen = int(np.argmax(last_positions[own] > least))
        first[i] = starts[own][seen] - base
    return first


def _items(queries: np.ndarray, kv_heads: int, keys: int, first: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Work items [items, FIELDS], and the rows whose parts are added by a second kernel [rows, 3].

    How the keys are divided changes no bit, so it is chosen by how many programs there would be otherwise.
    """
    row, tokens, base, order = queries[:, 0], queries[:, 1], queries[:, 2], queries[:, 3]
    end = (order + tokens - 1) // keys + 1
    begin = np.zeros_like(end) if first is None else first
    count, none = end - begin, np.zeros_like(end)
    # The longest first, so that no long one is left for the end.
    programs, parts = len(queries) * kv_heads, int((tokens * count).sum())
    if programs >= PROGRAMS or parts > MAX_PARTS or count.max() == 1:
        whole = np.stack([row, tokens, base, order, begin, end, none, none], 1)
        return whole[np.argsort(-count, kind="stable")], np.zeros((0, 3), np.int64)
    step = max(1, -(-int(count.sum()) * kv_heads // (2 * PROGRAMS)))
    pieces = -(-count // step)
    part = np.cumsum(tokens * count) - tokens * count
    tile = np.repeat(np.arange(len(queries)), pieces)
    nth = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    froms = begin[tile] + nth * step
    # Part n of a token is that of its tile begin + n.
    places = (part - begin)[tile]
    items = [row[tile], tokens[tile], base[tile], order[tile], froms, np.minimum(froms + step, end[tile]), places]
    of_row = np.repeat(np.arange(len(queries)), tokens)
    token = np.arange(len(of_row)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    rows = np.stack([row[of_row] + token, part[of_row] + token * count[of_row], count[of_row]], 1)
    return np.stack([*items, count[tile]], 1), rows


def flat_biases(batch: RaggedBatch[np.ndarray]) -> np.ndarray | None:
    """What is added to scores, of the entries of all sequences one after another; None if nothing is.

    [layers, KV heads, entries] float32, in logarithms to base 2.
    """
    known = [(number, bias) for number, bias in enumerate(batch.biases) if bias is not None]
    if not known:
        return None
    ends = np.cumsum([int((table[:, STOP] - table[:, START]).sum()) for table in batch.tables])
    flat = np.zeros((*known[0][1].shape[:2], ends[-1]), np.float32)
    for number, bias in known:
        start = ends[number - 1] if number else 0
        flat[:, :, start : start + bias.shape[2]] = bias * np.float32(LOG2_E)
    return flat
