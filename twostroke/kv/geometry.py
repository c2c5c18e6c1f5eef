"""The properties that must agree to join two KV values, or to use a value with a model."""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from twostroke.backends.interface import POSITION
from twostroke.errors import GeometryMismatch
from twostroke.kv import spans
from twostroke.kv.entries import EntryTable
from twostroke.models.config import ModelConfig
from twostroke.models.kv_formats import KVFormat, kv_format
from twostroke.models.layer_groups import LayerGroup, PageShape, StatePages, layer_groups
from twostroke.models.recurrent import RecurrentMixer
from twostroke.models.rope import NO_ROPE, Rope
from twostroke.models.stable_repr import LATER, StableRepr


@dataclass(frozen=True, repr=False)
class Geometry(StableRepr):
    """The shape and meaning of an entry. It does not include the weights: models of one geometry may share values."""

    groups: tuple[LayerGroup, ...]  # the layers whose entries share pages
    ropes: tuple[Rope, ...]  # the RoPE of each layer with attention
    kv_dtype: str  # how K and V are stored, one of `models.kv_formats.KV_FORMATS`
    tokenizer: str  # the tokenizer's fingerprint
    # (layer, its state) of each layer that has one
    states: tuple[tuple[int, RecurrentMixer], ...] = field(default=(), repr=False, metadata=LATER)

    @classmethod
    def of(cls, config: ModelConfig, kv_dtype: str, tokenizer: str) -> "Geometry":
        return cls(
            layer_groups(config, kv_dtype), config.ropes, kv_dtype, tokenizer, tuple(config.state_layers.items())
        )

    @cached_property
    def kv_groups(self) -> tuple[tuple[int, LayerGroup], ...]:
        """(index, group) of those that have K and V."""
        return tuple((g, group) for g, group in enumerate(self.groups) if group.kind == "kv")

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have K and V of their own, rising."""
        return tuple(sorted(layer for _, group in self.kv_groups for layer in group.layers))

    @cached_property
    def kv_heads(self) -> int | None:
        """The number of KV heads of each of them; None if they differ."""
        counts = {group.num_kv_heads for _, group in self.kv_groups}
        return counts.pop() if len(counts) == 1 else None

    @cached_property
    def turned_groups(self) -> tuple[int, ...]:
        """The groups of which a layer's K depends on positions."""
        return tuple(g for g, group in self.kv_groups if any(self.rope_of(layer) != NO_ROPE for layer in group.layers))

    def rope_of(self, layer: int) -> Rope:
        """The RoPE of a layer with attention."""
        return self.ropes[layer - sum(index < layer for index, _ in self.states)]

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group, or None."""
        return tuple(group.window for group in self.groups)

    @cached_property
    def windowed(self) -> bool:
        """Whether any group has a window."""
        return any(window is not None for window in self.windows)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of one entry in each group: for K and V its layers x 2 x KV heads x width x element size."""
        return tuple(group.entry_bytes(self.stored) for group in self.groups)

    @property
    def entry_bytes(self) -> int:
        """Bytes of K and V of one entry in all layers."""
        return sum(self.group_bytes[group] for group, _ in self.kv_groups)

    def page_shape(self, page_size: int) -> PageShape:
        """What a page holds."""
        return PageShape(self.groups, page_size, self.kv_dtype)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page, as many for every group."""
        return self.page_shape(page_size).page_bytes

    def num_pages(self, entries: int, page_size: int, at_once: int = 1, values: int = 1) -> int:
        """Pages that a value of so many entries holds at most, in all groups, if `at_once` entries are added together.

        A windowed group keeps what the next entries see. Of rows and inputs of states, a value has those that are
        needed behind the last entry, and of states two snapshots. With `values` of 2, a value that it continues holds
        its own of these as well: what is behind the windows of the one may be in those of the other.
        """
        every, pages = -(-entries // page_size), 0
        for group in self.groups:
            # A run of n entries lies in at most (n + page_size - 2) // page_size + 1 pages.
            reach = (at_once if group.kind == "kv" else 1) + page_size - 2
            kept = every if group.window is None else (group.window + reach) // page_size + 1
            pages += min(every, values * kept)
        return pages + (self.snapshot_pages(page_size) * min(2 * values, entries // self.chunk) if self.states else 0)

    @property
    def chunk(self) -> int:
        """Positions between two snapshots of states."""
        return self.states[0][1].chunk

    def has_layout(self, group: int) -> bool:
        """Whether the order of numbers in pages of a group depends on the memory's layout; not that of snapshots."""
        return group < len(self.groups) and self.groups[group].kind == "kv"

    def state_pages(self, page_size: int) -> StatePages:
        """Where states lie in the pages of a snapshot."""
        return StatePages(dict(self.states), self.page_bytes(page_size))

    def snapshot_pages(self, page_size: int) -> int:
        """Pages of a snapshot of all states; 0 for a model without any."""
        return self.state_pages(page_size).num_pages if self.states else 0

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all states, which are float32."""
        return sum(4 * state.snapshot_values for _, state in self.states)

    def known_state(self, contents: EntryTable) -> bool:
        """Whether the state behind the last entry is known: a snapshot, and all rows and inputs since."""
        limits = self._limits(contents)
        if limits is None:
            return False
        kinds = (group.kind for group in self.groups)
        end = contents.next_position
        only = tuple(end if kind == "kv" else limit for kind, limit in zip(kinds, limits, strict=True))
        return spans.complete(contents.table, only)

    def complete(self, contents: EntryTable) -> bool:
        """Whether a stroke can go on behind the last entry: all is there that the next one reads."""
        limits = self._limits(contents)
        if limits is None or spans.complete(contents.table, limits):
            return limits is not None
        return contents.bias is not None and bool((self.unseen(contents) | spans.held(contents.table)).all())

    def unseen(self, contents: EntryTable) -> np.ndarray:
        """Whether no head of a group sees any entry of a span, by their bias, [P, groups]. Such spans need no page."""
        table, bias = contents.table, contents.bias
        if bias is None or not len(table):
            return np.zeros((len(table), len(self.groups)), bool)
        sizes = spans.counts(table)
        layers = np.logical_and.reduceat(np.isneginf(bias).all(2), np.cumsum(sizes) - sizes)
        places = [[self.kv_layers.index(layer) for layer in group.layers] for group in self.groups]
        return np.stack([layers[:, own].all(1) for own in places], 1)

    def _limits(self, contents: EntryTable) -> tuple[int | None, ...] | None:
        """`limits` of the next entry; None without a snapshot of states before it."""
        position, since = contents.next_position, 0
        if self.states:
            if (last := contents.last_snapshot) is None:
                return None
            since = len(contents) - last.at
            if since and not self._in_one_chunk(contents.cut(last.at, len(contents)).table, position - since, since):
                return None
        return self.limits(position, since)

    def _in_one_chunk(self, table: np.ndarray, first: int, count: int) -> bool:
        """Whether these are the positions of so many entries, and no snapshot is between them."""
        right = int(table[0, POSITION]) == first and spans.end_position(table) == first + count
        return right and first // self.chunk == (first + count - 1) // self.chunk

    def limits(self, position: int, since: int) -> tuple[int | None, ...]:
        """For each group, the last position that an entry at `position` does not need; None where it needs all.

        `since`: the number of entries since the last snapshot of states.
        """
        return tuple(self._limit(group, position, since) for group in self.groups)

    def _limit(self, group: LayerGroup, position: int, since: int) -> int | None:
        if group.window is None:
            return None
        reach = {"kv": group.window, "rows": since + 1, "inputs": min(since + 1, group.window)}
        return position - reach[group.kind]

    def answer_pages(self, entries: int, page_size: int) -> int:
        """Pages for a value of so many entries and what the value that it continues keeps.

        So every way to an answer has room for as many tokens: whole or in chunks, cold or behind a hit, and entered
        again after a preemption.
        """
        return self.num_pages(entries, page_size, values=2)

    def max_entries(self, pages: int, page_size: int) -> int:
        """The most entries of an answer's value in so many pages."""
        lengths = range(pages * page_size + 1)
        return bisect_right(lengths, pages, key=lambda entries: self.answer_pages(entries, page_size)) - 1

    def value_bytes(self, entries: int) -> int:
        """Bytes of a value of so many entries, of which windowed groups have those that the next one attends to."""
        sizes = zip(self.groups, self.group_bytes, strict=True)
        held = sum(size * self._entries_held(group, entries) for group, size in sizes)
        return held + (self.state_bytes if self.states and entries >= self.chunk else 0)

    def _entries_held(self, group: LayerGroup, entries: int) -> int:
        if group.kind == "rows":
            return entries % self.chunk
        return entries if group.window is None else min(entries, group.window)

    def table_bytes(self, table: np.ndarray) -> int:
        """Exact bytes of the entries of a span table, without those that windowed groups have given back."""
        held = spans.counts(table) @ spans.held(table)
        return int(held @ np.array(self.group_bytes))

    @property
    def stored(self) -> KVFormat:
        """How K and V are stored."""
        return kv_format(self.kv_dtype)

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()

    def require(self, other: "Geometry", what: str) -> None:
        """Raise GeometryMismatch if `other` differs; the message names every differing field."""
        if self is other or self == other:
            return
        differing = [
            f"{f.name} {_short(getattr(other, f.name))} is not {_short(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        raise GeometryMismatch(f"{what}: the KV geometry differs: {'; '.join(differing)}")


def layers_by_kind(groups: Iterable[LayerGroup]) -> Counter[tuple[int, int, int | None, bool]]:
    """The number of layers with K and V of their own, by KV heads, head_dim, window, and whether K is V."""
    layers = Counter[tuple[int, int, int | None, bool]]()
    for one in groups:
        if one.kind == "kv":
            layers[one.num_kv_heads, one.head_dim, one.window, one.one_part] += len(one.layers)
    return layers


def _short(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)[:16]
    if any(isinstance(one, LayerGroup) for one in value):
        return f"[{', '.join(_kind(*kind, count) for kind, count in layers_by_kind(value).items())}]"
    kinds = sorted({str(rope) for rope in value})
    return f"[{len(value)} layers: {', '.join(kinds)}]"


def _kind(heads: int, dim: int, window: int | None, one_part: bool, layers: int) -> str:
    entries = f"latent entries of {dim}" if one_part else f"{heads} KV heads of {dim}"
    return f"{layers} layers of {entries}" + ("" if window is None else f", window {window}")
