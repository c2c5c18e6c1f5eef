"""Groups of layers whose entries share pages: layers of one window and one shape.

A page holds the entries of `page_size` tokens in the layers of one group, and all pages of a model have the same number
of bytes, so that any frame of a pool serves any group (as in vLLM's hybrid KV cache manager). A model whose layers are
all alike has one group. Gemma 3 270M, with 15 sliding layers and 3 global ones, has six groups of three layers: behind
the window, five of six pages go back to the pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from twostroke.models.config import ModelConfig

TYPICAL_LENGTH = 8192  # entries of a value for which the layers are divided well
GROUP_COST = 0.01  # a further group costs as much as so large a part of the memory: each has pages to place in a step


@dataclass(frozen=True)
class LayerGroup:
    """Layers that have their entries in the same pages.

    Attributes:
        layers: their indices in the model, rising.
        window: a query at position p attends to keys at positions > p - window; None for all keys.
        num_kv_heads, head_dim: the shape of K and of V of an entry in a layer.
        depth: the number of layers for which a page has room; at least that of `layers`.
    """

    layers: tuple[int, ...]
    window: int | None
    num_kv_heads: int
    head_dim: int
    depth: int

    @property
    def layer_values(self) -> int:
        """Numbers of K and V of an entry in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def entry_values(self) -> int:
        """Numbers of K and V of an entry in all layers of the group."""
        return self.layer_values * len(self.layers)

    def blocks_in_window(self, page_size: int) -> int | None:
        """Pages that a token at the start of a page attends to, besides its own; None for all before it."""
        return None if self.window is None else -(-(self.window - 1) // page_size)


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """The groups of a model. Those without a window come first."""
    kinds: dict[tuple[int | None, int, int], list[int]] = {}
    for index, one in enumerate(config.attentions):
        if one.source is None:
            kinds.setdefault((one.window, *one.kv_shape), []).append(index)
    room = _page_room(kinds) if kinds else 0  # a head alone, in tests, has no layers
    groups: list[LayerGroup] = []
    for (window, heads, dim), layers in sorted(kinds.items(), key=lambda kind: kind[0][0] is not None):
        depth = room // (2 * heads * dim)
        count = -(-len(layers) // depth)
        starts = [i * len(layers) // count for i in range(count + 1)]
        groups += [LayerGroup(tuple(layers[start:stop]), window, heads, dim, depth) for start, stop in pairwise(starts)]
    return tuple(groups)


@dataclass(frozen=True)
class PageShape:
    """The pages of a model: for each group [depth, 2, KV heads, page_size, head_dim], all of `values` numbers."""

    groups: tuple[LayerGroup, ...]
    page_size: int

    def of(self, group: int) -> tuple[int, int, int, int, int]:
        """The shape of a page of a group."""
        one = self.groups[group]
        return one.depth, 2, one.num_kv_heads, self.page_size, one.head_dim

    @property
    def shapes(self) -> list[tuple[int, int, int, int, int]]:
        """The shape of a page of each group."""
        return [self.of(group) for group in range(len(self.groups))]

    @property
    def values(self) -> int:
        """Numbers of K and V in a page: those of the group that needs most."""
        return self.page_size * max(group.layer_values * group.depth for group in self.groups)


def entry_places(config: ModelConfig) -> list[tuple[int, int]]:
    """Where the entries of each layer are: the group, and the place in the group's pages."""
    places = {layer: (g, i) for g, group in enumerate(layer_groups(config)) for i, layer in enumerate(group.layers)}
    return [places[index if one.source is None else one.source] for index, one in enumerate(config.attentions)]


def _page_room(kinds: Mapping[tuple[int | None, int, int], list[int]]) -> int:
    """Numbers of K and V of one token for which a page has room, in whole layers of one kind.

    More room means fewer groups, and more of it unused where the layers of a kind are no multiple of what fits.
    """
    values = {kind: 2 * kind[1] * kind[2] for kind in kinds}

    def cost(room: int) -> tuple[float, int]:
        held = needed = 0.0
        count = 0
        for kind, layers in kinds.items():
            share = 1.0 if kind[0] is None else min(1.0, kind[0] / TYPICAL_LENGTH)
            pages = -(-len(layers) // (room // values[kind]))
            held += share * pages * room
            needed += share * len(layers) * values[kind]
            count += pages
        return held / needed + GROUP_COST * count, room

    rooms = {k * values[kind] for kind, layers in kinds.items() for k in range(1, len(layers) + 1)}
    return min((room for room in rooms if room >= max(values.values())), key=cost)
