"""The work of a step: FLOPs and bytes, counted from the architecture."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from twostroke.models.config import Experts, ModelConfig
from twostroke.models.recurrent import RecurrentMixer
from twostroke.models.tensor_shapes import is_product, layer_shapes


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a step: `count` tokens after `context` entries; the last `logits` rows need logits."""

    count: int
    context: int = 0
    logits: int = 0


def attended(rows: SequenceRows, window: int | None) -> tuple[int, int]:
    """Count what the rows attend to in a layer: (query-key pairs, distinct entries). A row attends to itself too.

    With a window of W, a row attends to the last W entries. Without one, n rows after c entries have
    n c + n (n + 1) / 2 pairs.
    """
    if window is None:
        return rows.count * rows.context + rows.count * (rows.count + 1) // 2, rows.count + rows.context
    # The first `short` rows attend to all entries up to themselves, the others to a whole window.
    short = min(rows.count, max(0, window - rows.context))
    pairs = short * rows.context + short * (short + 1) // 2 + (rows.count - short) * window
    return pairs, rows.count + min(rows.context, window - 1)


class RecurrentWork(NamedTuple):
    """What a sequence's rows compute and read in one layer with a state (`models.recurrent`)."""

    flops: int
    values: int  # numbers of rows of the open chunk and of inputs of the convolution, 16 bits each
    states: float  # numbers of states, float32

    @property
    def bytes(self) -> float:
        return 2 * self.values + 4 * self.states


def recurrent(rows: SequenceRows, state: RecurrentMixer) -> RecurrentWork:
    """Count the work of rows at the positions of their entries.

    A row attends to the rows of its chunk up to itself, passes the convolution, and meets the state. A sequence's state
    is read once in a step, if it is not zero, and written once in a chunk.
    """
    opened, chunk = rows.context % state.chunk, state.chunk
    pairs = _chunk_pairs(opened + rows.count, chunk) - _chunk_pairs(opened, chunk)
    flops = state.pair_flops * pairs + rows.count * state.row_flops
    values = state.row_values * min(opened + rows.count, chunk)
    values += state.conv_size * min(rows.context + rows.count, state.conv_width)
    return RecurrentWork(flops, values, state.snapshot_values * ((rows.context >= chunk) + min(1, rows.count / chunk)))


def _chunk_pairs(count: int, chunk: int) -> int:
    """Pairs of a row and one up to it in the same chunk, of `count` rows from a chunk's start on."""
    whole, left = divmod(count, chunk)
    return whole * (chunk * (chunk + 1) // 2) + left * (left + 1) // 2


def experts_read(count: int, chosen: int, rows: float) -> float:
    """Expected number of distinct experts of `count` that `rows` rows choose: E (1 - (1 - k / E)^n), each choosing k.

    This assumes that experts are equally likely and rows independent; rows of one text are similar and choose fewer.
    """
    return count * (1 - (1 - chosen / count) ** rows)


class WorkAmounts(NamedTuple):
    """The work of a step. A multiplication and an addition are two FLOPs."""

    weight_bytes: float  # read once per step for all rows; only experts that some row is expected to choose
    kv_bytes: float  # entries that each sequence's rows attend to, once for all of its rows, and states
    linear_flops: float
    attention_flops: float  # and those of recurrent layers beyond their matrices
    head_flops: float


@dataclass(frozen=True)
class CostModel:
    """Computes the work of one model's steps."""

    config: ModelConfig
    matrix_bytes: Mapping[str, int]  # bytes of each weight matrix, by Twostroke name, in the backend's form
    entry_bytes: int  # bytes of K and V of one entry, all layers

    @cached_property
    def dense_bytes(self) -> int:
        """The matrices of all layers that every step reads: all but experts, and routers in float32."""
        routers = sum(4 * experts.count * self.config.hidden_size for experts, _ in self._experts)
        return routers + sum(size for name, size in self.matrix_bytes.items() if _part(name) == "dense")

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of the head, read in steps that need logits."""
        return self.matrix_bytes[self.config.head_tensor]

    @cached_property
    def _experts(self) -> list[tuple[Experts, int]]:
        """Each layer with experts, and the bytes of all its experts."""
        sizes: Counter[int] = Counter()
        for name, size in self.matrix_bytes.items():
            if _part(name) == "experts":
                sizes[int(name.split(".")[1])] += size
        layers = enumerate(layer.feed_forward for layer in self.config.layers)
        return [(feed_forward, sizes[i]) for i, feed_forward in layers if isinstance(feed_forward, Experts)]

    def layer_bytes(self, rows: int) -> float:
        """Expected bytes of the layers' matrices that a step of `rows` rows reads (see `experts_read`)."""
        return self.dense_bytes + sum(
            size / experts.count * experts_read(experts.count, experts.chosen, rows) for experts, size in self._experts
        )

    @cached_property
    def row_flops(self) -> int:
        """FLOPs of all linear layers except the head for one row; with experts, of the chosen ones and the router."""
        hidden, size = self.config.hidden_size, self.config.token_inputs
        weights = self.config.num_layers * hidden * size  # of the projection to all layers' inputs
        for layer, copies in Counter(self.config.layers).items():
            products = {
                name: prod(one) for name, one in layer_shapes(layer, hidden, size).items() if is_product(name, one)
            }
            used = sum(products.values())
            if isinstance(experts := layer.feed_forward, Experts):
                of_all = sum(one for name, one in products.items() if name.startswith("experts."))
                used -= of_all // experts.count * (experts.count - experts.chosen)
            weights += copies * used
        return 2 * weights

    @cached_property
    def head_row_flops(self) -> int:
        return 2 * self.config.vocab_size * self.config.hidden_size

    @cached_property
    def windows(self) -> list[tuple[int | None, int, int]]:
        """Of the layers with each window together: FLOPs of a row's attention to a key, and numbers of K and V read."""
        flops, values = Counter[int | None](), Counter[int | None]()
        for one in self.config.attentions:
            flops[one.window] += 4 * one.num_heads * one.head_dim  # the score, and the weighted value
            values[one.window] += one.kv_values
        return [(window, flops[window], values[window]) for window in flops]

    @cached_property
    def states(self) -> Counter[RecurrentMixer]:
        """The number of layers with each shape of a state."""
        return Counter(self.config.state_layers.values())

    @cached_property
    def entry_values(self) -> int:
        """Numbers of K and V of an entry, in the layers that have their own."""
        return sum(one.kv_values for one in self.config.attentions if one.source is None)

    def work(self, step: Iterable[SequenceRows]) -> WorkAmounts:
        """The work of a step with these rows of all its sequences."""
        rows = logits = attention = seen = 0
        other = 0.0
        for one in step:
            rows += one.count
            logits += one.logits
            for window, flops, values in self.windows:
                pairs, entries = attended(one, window)
                attention += flops * pairs
                seen += values * entries
            for state, layers in self.states.items():
                work = recurrent(one, state)
                attention += layers * work.flops
                other += layers * work.bytes
        if not rows:
            return WorkAmounts(0, 0, 0, 0, 0)
        return WorkAmounts(
            self.layer_bytes(rows) + self.head_bytes * bool(logits),
            self.entry_bytes * seen / self.entry_values + other,
            self.row_flops * rows,
            attention,
            self.head_row_flops * logits,
        )


def _part(name: str) -> str:
    """Kind of a matrix: "outer" (outside the layers), "experts", or "dense" (read by every step)."""
    return "outer" if not name.startswith("layers.") else "experts" if ".experts." in name else "dense"
