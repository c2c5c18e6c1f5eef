"""The attention of a whole prompt, tile by tile: memory for a tile of scores and a map of cells, never for a matrix.

Queries come from the engine's own pass, keys from the pool. The kernels never hold the matrix either: they add up each
row while they go over the keys (FlashAttention, Dao et al. 2022, arXiv:2205.14135).
"""

from dataclasses import dataclass, replace

import numpy as np

from twostroke.kv.attention import Queries, attention_scores, softmax
from twostroke.kv.cache import KVCache
from twostroke.models.config import ModelConfig

CELLS = 64  # rows and columns of a map, at most
TILE_SCORES = 1 << 18  # in memory at once, about: 1 MiB
ALL_LAYERS = 256  # tokens of a prompt up to which every layer has a map


@dataclass(frozen=True)
class AttentionHeatMap:
    """The weights with which each row attends to each column."""

    layer: int  # its index
    head: int | None  # its index; None for the mean over heads
    # row i has i + 1 cells. A cell is the sum over its columns' entries, mean over its rows: each row's sum is 1.
    weights: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class AttentionArithmetic:
    """The numbers behind one layer's map, kept for short prompts."""

    queries: np.ndarray  # [n, Hq, D] float32, after RoPE and times the scale; keys: [n, Hkv, D] float32, after RoPE
    keys: np.ndarray
    # for each head and row, the products of its query with the keys that it sees; -inf outside of a window
    scores: tuple[tuple[np.ndarray, ...], ...]


@dataclass(frozen=True)
class PromptAttention:
    """The attention of a prompt."""

    # layer, head: those that were asked for, shown first; head None is the mean over heads
    layer: int
    head: int | None
    scale: float  # what scores are multiplied by
    window: int | None  # of this layer, in positions; None if a row sees everything before it
    starts: tuple[int, ...]  # index of the first entry of each cell, the same for rows and columns
    # the mean over heads of each layer with attention; of a long prompt, of `layer` alone
    layers: tuple[AttentionHeatMap, ...]
    heads: tuple[AttentionHeatMap, ...]  # every head of `layer`
    arithmetic: AttentionArithmetic | None  # of `layer`; None if the prompt has more tokens than a map has cells

    @property
    def shown(self) -> AttentionHeatMap:
        """The map of the layer and head that were asked for."""
        if self.head is not None:
            return self.heads[self.head]
        return next(one for one in self.layers if one.layer == self.layer)


class AttentionCollector:
    """Collects the attention of a prompt of `length` tokens while it is prefilled in tiles of rows."""

    def __init__(self, config: ModelConfig, length: int, layer: int, head: int | None) -> None:
        self._config, self._length, self._layer, self._head = config, length, layer, head
        width = -(-length // CELLS)
        self._starts = np.arange(0, length, width)
        self._width = width
        self._places = {one: place for place, one in enumerate(config.attention_layers)}  # in queries
        self._layers = list(self._places) if length <= ALL_LAYERS else [layer]
        cells = len(self._starts)
        self._means = np.zeros((len(self._layers), cells, cells))
        self._heads = np.zeros((config.num_heads, cells, cells))
        self._exact = width == 1
        self._queries: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []
        self._keys = np.empty((0, config.num_kv_heads, config.head_dim), np.float32)

    def add(self, kv: KVCache, queries: Queries) -> None:
        """Add the rows of a value's last entries."""
        rows = max(1, TILE_SCORES // (self._config.num_heads * len(kv)))
        for start in range(0, len(queries), rows):
            stop = min(start + rows, len(queries))
            some = replace(queries, rows=queries.rows[:, start:stop])
            self._tile(kv[: len(kv) - len(queries) + stop], some)
        if self._exact:
            self._queries.append(queries.rows[self._places[self._layer]].copy())
            self._keys = kv.keys(self._layer).astype(np.float32)

    def _tile(self, kv: KVCache, queries: Queries) -> None:
        end, starts = len(kv), self._starts[self._starts < len(kv)]
        cells = np.arange(end - len(queries), end) // self._width
        for i, layer in enumerate(self._layers):
            scores = attention_scores(kv, queries, self._places[layer])
            if layer == self._layer and self._exact:
                self._scores += list(scores.copy().swapaxes(0, 1))
            weights = np.add.reduceat(softmax(scores), starts, axis=-1)  # [Hq, rows, cells]
            np.add.at(self._means[i, :, : len(starts)], cells, weights.mean(0))
            if layer == self._layer:
                np.add.at(self._heads.swapaxes(0, 1)[:, :, : len(starts)], cells, weights.swapaxes(0, 1))

    def result(self) -> PromptAttention:
        """The maps, once all rows were seen."""
        counts = np.diff(self._starts, append=self._length)[:, None]
        means, heads = self._means / counts, self._heads / counts
        config, layer = self._config, self._layer
        arithmetic = None
        if self._exact:
            queries = np.concatenate(self._queries)
            scores = [tuple(row[head, : i + 1] for i, row in enumerate(self._scores)) for head in range(len(heads))]
            arithmetic = AttentionArithmetic(queries, self._keys, tuple(scores))
        return PromptAttention(
            layer,
            self._head,
            config.layers[layer].attention.scale,
            config.layers[layer].attention.window,
            tuple(self._starts.tolist()),
            tuple(AttentionHeatMap(one, None, _lower(means[i])) for i, one in enumerate(self._layers)),
            tuple(AttentionHeatMap(layer, head, _lower(weights)) for head, weights in enumerate(heads)),
            arithmetic,
        )


def _lower(weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """The lower triangle: each row without the columns after its own."""
    return tuple(row[: i + 1].astype(np.float32) for i, row in enumerate(weights))
