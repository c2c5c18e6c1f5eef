"""Groups of layers whose entries share pages: layers of one window and one shape.

A page holds the entries of `page_size` tokens in the layers of one group, and all pages of a model have the same number
of bytes, so that any frame of a pool serves any group (as in vLLM's hybrid KV cache manager). A model whose layers are
all alike has one group. Gemma 3 270M, with 15 sliding layers and 3 global ones, has six groups of three layers: behind
the window, five of six pages go back to the pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from twostroke.models.config import ModelConfig
from twostroke.models.kv_formats import KVFormat, kv_format
from twostroke.models.recurrent import RecurrentMixer
from twostroke.models.stable_repr import LATER, StableRepr

TYPICAL_LENGTH = 8192  # entries of a value for which the layers are divided well
GROUP_COST = 0.01  # a further group costs as much as so large a part of the memory: each has pages to place in a step
EntryKind = Literal["kv", "rows", "inputs"]


class _Kind(NamedTuple):
    """Entries of one kind, shape and window."""

    window: int | None
    num_kv_heads: int
    head_dim: int
    kind: EntryKind
    one_part: bool = False


@dataclass(frozen=True, repr=False)
class LayerGroup(StableRepr):
    """Layers that have their entries in the same pages."""

    layers: tuple[int, ...]  # their indices in the model, rising
    window: int | None  # a query at position p attends to keys at positions > p - window; None for all keys
    # num_kv_heads, head_dim: the shape of K and of V of an entry in a layer; 1 and its size for one that is neither
    num_kv_heads: int
    head_dim: int
    depth: int  # the number of layers for which a page has room; at least that of `layers`
    # "kv" for K and V. Layers with a state have entries of two kinds: "rows", which say how tokens since the last
    # snapshot change it, and "inputs" of the convolution (`models.recurrent`).
    kind: EntryKind = field(default="kv", repr=False, metadata=LATER)
    # whether K is V too, and stored once (`models.latent`)
    one_part: bool = field(default=False, repr=False, metadata=LATER)

    def parts(self, stored: KVFormat) -> int:
        """2 for K and V, 1 for records of them (`KVFormat`), for K that is V, and for other entries."""
        return stored.parts if self.kind == "kv" and not self.one_part else 1

    def dtype(self, stored: KVFormat) -> np.dtype:
        """numpy dtype of the elements of an entry."""
        return stored.dtype if self.kind == "kv" else stored.other

    def width(self, stored: KVFormat) -> int:
        """Elements of an entry in one layer, for one head and part."""
        return stored.width(self.head_dim) if self.kind == "kv" else self.head_dim

    def layer_bytes(self, stored: KVFormat) -> int:
        """Bytes of an entry in one layer."""
        return self.parts(stored) * self.num_kv_heads * self.width(stored) * self.dtype(stored).itemsize

    def entry_bytes(self, stored: KVFormat) -> int:
        """Bytes of an entry in all layers of the group."""
        return self.layer_bytes(stored) * len(self.layers)

    def blocks_in_window(self, page_size: int) -> int | None:
        """Pages that a token at the start of a page attends to, besides its own; None for all before it."""
        return None if self.window is None else -(-(self.window - 1) // page_size)


def layer_groups(config: ModelConfig, kv_dtype: str) -> tuple[LayerGroup, ...]:
    """The groups of a model whose K and V are stored as `kv_dtype` says. Those without a window come first."""
    kinds: dict[_Kind, list[int]] = {}
    for index, one in config.attention_layers.items():
        if one.source is None:
            window = None if one.both_ways else one.window  # a text enters in one step, which sees all of its pages
            kinds.setdefault(_Kind(window, *one.kv_shape, "kv", one.latent is not None), []).append(index)
    for index, state in config.state_layers.items():
        if state.row_values:
            kinds.setdefault(_Kind(state.chunk, 1, state.row_values, "rows"), []).append(index)
        kinds.setdefault(_Kind(state.conv_width, 1, state.conv_size, "inputs"), []).append(index)
    stored = kv_format(kv_dtype)
    sizes = {kind: LayerGroup((), *kind[:3], 1, *kind[3:]).layer_bytes(stored) for kind in kinds}
    # A head alone, in tests, has no layers.
    room = 0 if not kinds else max(sizes.values()) if config.layers_apart else _page_room(kinds, sizes)
    groups: list[LayerGroup] = []
    for kind, layers in sorted(kinds.items(), key=lambda one: one[0].window is not None):
        depth = room // sizes[kind]
        count = -(-len(layers) // depth)
        starts = [i * len(layers) // count for i in range(count + 1)]
        groups += [
            LayerGroup(tuple(layers[start:stop]), *kind[:3], depth, *kind[3:]) for start, stop in pairwise(starts)
        ]
    return tuple(groups)


@dataclass(frozen=True)
class PageShape:
    """The pages of a model: for each group [depth, parts, KV heads, page_size, width], all of as many bytes.

    Parts are K and V, of head_dim numbers, or one: of records (`models.kv_formats`), or of K that is V.
    """

    groups: tuple[LayerGroup, ...]
    page_size: int
    kv_dtype: str

    @property
    def stored(self) -> KVFormat:
        """How K and V are stored."""
        return kv_format(self.kv_dtype)

    def of(self, group: int) -> tuple[int, int, int, int, int]:
        """The shape of a page of a group."""
        one = self.groups[group]
        return one.depth, one.parts(self.stored), one.num_kv_heads, self.page_size, one.width(self.stored)

    def dtype_of(self, group: int) -> np.dtype:
        """numpy dtype of the elements of a page of a group."""
        return self.groups[group].dtype(self.stored)

    @property
    def shapes(self) -> list[tuple[int, int, int, int, int]]:
        """The shape of a page of each group."""
        return [self.of(group) for group in range(len(self.groups))]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: those of the group that needs most."""
        return self.page_size * max(group.layer_bytes(self.stored) * group.depth for group in self.groups)


def entry_places(config: ModelConfig, kv_dtype: str, kind: EntryKind = "kv") -> dict[int, tuple[int, int]]:
    """Where the entries of one kind of each layer are: the group, and the place in the group's pages."""
    groups = [(g, group) for g, group in enumerate(layer_groups(config, kv_dtype)) if group.kind == kind]
    places = {layer: (g, i) for g, group in groups for i, layer in enumerate(group.layers)}
    borrowed = {index: one.source for index, one in config.attention_layers.items() if one.source is not None}
    return places | {index: places[source] for index, source in borrowed.items() if kind == "kv"}


@dataclass(frozen=True)
class StatePages:
    """Where the states of a model's layers lie in the pages of a snapshot, float32.

    The numbers of a layer, its state [heads of v, k_dim, v_dim] and the last inputs of its convolution [conv_width - 1,
    conv_size], are cut into rows of `snapshot_row`, as many in a page as fit. Each layer begins with a page of its own.
    """

    layers: Mapping[int, RecurrentMixer]  # the layers with a state, by index
    page_bytes: int  # bytes of a page

    def rows_in_page(self, layer: int) -> int:
        """Number of rows of a layer's state in a page."""
        return self.page_bytes // (4 * self.layers[layer].snapshot_row)

    def num_pages_of(self, layer: int) -> int:
        """Pages of one layer's state."""
        state = self.layers[layer]
        rows = -(-state.snapshot_values // state.snapshot_row)
        return -(-rows // self.rows_in_page(layer))

    @cached_property
    def starts(self) -> dict[int, int]:
        """The first of a snapshot's pages that has a layer's state."""
        found, count = dict[int, int](), 0
        for layer in self.layers:
            found[layer] = count
            count += self.num_pages_of(layer)
        return found

    @cached_property
    def used_bytes(self) -> list[int]:
        """Bytes of each of a snapshot's pages that hold states. What follows belongs to nobody."""
        used = list[int]()
        for layer, state in self.layers.items():
            size, left = self.rows_in_page(layer) * 4 * state.snapshot_row, 4 * state.snapshot_values
            used += [min(size, left - i * size) for i in range(self.num_pages_of(layer))]
        return used

    @property
    def num_pages(self) -> int:
        """Pages of a snapshot."""
        return len(self.used_bytes)


def _page_room(kinds: Mapping[_Kind, list[int]], sizes: Mapping[_Kind, int]) -> int:
    """Bytes of one token for which a page has room, in whole layers of one kind; `sizes` are those of one layer.

    More room means fewer groups, and more of it unused where the layers of a kind are no multiple of what fits.
    """

    def cost(room: int) -> tuple[float, int]:
        held = needed = 0.0
        count = 0
        for kind, layers in kinds.items():
            share = 1.0 if kind.window is None else min(1.0, kind.window / TYPICAL_LENGTH)
            pages = -(-len(layers) // (room // sizes[kind]))
            held += share * pages * room
            needed += share * len(layers) * sizes[kind]
            count += pages
        return held / needed + GROUP_COST * count, room

    rooms = {k * sizes[kind] for kind, layers in kinds.items() for k in range(1, len(layers) + 1)}
    return min((room for room in rooms if room >= max(sizes.values())), key=cost)
