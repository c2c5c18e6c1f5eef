"""The properties that must agree to join two KV values, or to use a value with a model."""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.errors import GeometryMismatch
from twostroke.kv import spans
from twostroke.models.config import ModelConfig
from twostroke.models.formats.blocks import numpy_dtype
from twostroke.models.layer_groups import LayerGroup, PageShape, layer_groups
from twostroke.models.rope import Rope


@dataclass(frozen=True)
class Geometry:
    """The shape and meaning of an entry. It does not include the weights: models of one geometry may share values.

    Attributes:
        groups: the layers whose entries share pages.
        ropes: the RoPE of each layer.
        kv_dtype: "float32", "bfloat16", ...
        tokenizer: the tokenizer's fingerprint.
    """

    groups: tuple[LayerGroup, ...]
    ropes: tuple[Rope, ...]
    kv_dtype: str
    tokenizer: str

    @classmethod
    def of(cls, config: ModelConfig, kv_dtype: str, tokenizer: str) -> "Geometry":
        return cls(layer_groups(config), config.ropes, kv_dtype, tokenizer)

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
        """Bytes of one entry in each group: its layers x 2 x KV heads x head_dim x element size."""
        return tuple(group.entry_values * self.dtype.itemsize for group in self.groups)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in all layers."""
        return sum(self.group_bytes)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page, as many for every group."""
        return PageShape(self.groups, page_size).values * self.dtype.itemsize

    def num_pages(self, entries: int, page_size: int, at_once: int = 1) -> int:
        """Pages that a value of so many entries holds at most, in all groups, if `at_once` entries are added together.

        A windowed group keeps what the next entries see.
        """
        every = -(-entries // page_size)
        reach = at_once + page_size - 2  # a run of n entries lies in at most (n + page_size - 2) // page_size + 1 pages
        return sum(every if w is None else min(every, (w + reach) // page_size + 1) for w in self.windows)

    def max_entries(self, pages: int, page_size: int) -> int:
        """The most entries that a value has in so many pages."""
        lengths = range(pages * page_size + 1)
        return bisect_right(lengths, pages, key=lambda entries: self.num_pages(entries, page_size)) - 1

    def value_bytes(self, entries: int) -> int:
        """Bytes of a value of so many entries, of which windowed groups have those that the next one attends to."""
        sizes = zip(self.windows, self.group_bytes, strict=True)
        return sum(size * (entries if window is None else min(entries, window)) for window, size in sizes)

    def table_bytes(self, table: np.ndarray) -> int:
        """Exact bytes of the entries of a span table, without those that windowed groups have given back."""
        held = spans.counts(table) @ (table[:, PAGE:] != spans.NO_PAGE)
        return int(held @ np.array(self.group_bytes))

    @property
    def dtype(self) -> np.dtype:
        """numpy dtype of K and V."""
        return numpy_dtype(self.kv_dtype)

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


def layers_by_kind(groups: Iterable[LayerGroup]) -> Counter[tuple[int, int, int | None]]:
    """The number of layers with entries of their own, by KV heads, head_dim and window."""
    layers = Counter[tuple[int, int, int | None]]()
    for one in groups:
        layers[one.num_kv_heads, one.head_dim, one.window] += len(one.layers)
    return layers


def _short(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)[:16]
    if any(isinstance(one, LayerGroup) for one in value):
        return f"[{', '.join(_kind(*kind, count) for kind, count in layers_by_kind(value).items())}]"
    kinds = sorted({str(rope) for rope in value})
    return f"[{len(value)} layers: {', '.join(kinds)}]"


def _kind(heads: int, dim: int, window: int | None, layers: int) -> str:
    return f"{layers} layers of {heads} KV heads of {dim}" + ("" if window is None else f", window {window}")
