"""What a step costs: its FLOPs and bytes, counted from the architecture, and the seconds they take on a machine."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from twostroke.models.config import Experts, ModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """What one sequence enters in a step: `count` tokens behind `context` entries; the last `logits` want logits."""

    count: int
    context: int = 0
    logits: int = 0


class Work(NamedTuple):
    """What a step computes and reads. A multiplication and an addition are two FLOPs."""

    weight_bytes: float  # once a step, however many rows; of experts, those that some row is expected to choose
    kv_bytes: float  # of the entries that each sequence's rows see, once for all of its rows
    linear_flops: float
    attention_flops: float
    head_flops: float


@dataclass(frozen=True)
class Cost:
    """Work of one model's steps.

    Attributes:
        matrix_bytes: of each weight matrix by its Twostroke name, in the formats that the backend computes on.
        entry_bytes: K and V of one entry, all layers.
    """

    config: ModelConfig
    matrix_bytes: Mapping[str, int]
    entry_bytes: int

    @cached_property
    def dense_bytes(self) -> int:
        """The matrices of all layers that every step reads: all but experts, and routers in float32."""
        routers = sum(4 * experts.count * self.config.hidden_size for experts, _ in self._experts)
        return routers + sum(size for name, size in self.matrix_bytes.items() if _part(name) == "dense")

    @cached_property
    def head_bytes(self) -> int:
        """Read in steps that want logits."""
        return self.matrix_bytes[self.config.head_tensor]

    @cached_property
    def _experts(self) -> list[tuple[Experts, int]]:
        """Each layer of experts, and the bytes of all of them."""
        sizes: Counter[int] = Counter()
        for name, size in self.matrix_bytes.items():
            if _part(name) == "experts":
                sizes[int(name.split(".")[1])] += size
        layers = enumerate(layer.feed_forward for layer in self.config.layers)
        return [(feed_forward, sizes[i]) for i, feed_forward in layers if isinstance(feed_forward, Experts)]

    def layer_bytes(self, rows: int) -> float:
        """What a step of so many rows is expected to read of all layers' matrices.

        Of E experts, of which each row chooses k, n rows choose E (1 - (1 - k / E)^n) different ones, if all are as
        likely as each other and rows choose by themselves; those of one text are more alike, and choose fewer.
        """
        return self.dense_bytes + sum(
            size * (1 - (1 - experts.chosen / experts.count) ** rows) for experts, size in self._experts
        )

    @cached_property
    def row_flops(self) -> int:
        """All linear layers but the head, for one row: of experts, the chosen ones and the router."""
        flops = 0
        for layer in self.config.layers:
            attention, feed_forward, hidden = layer.attention, layer.feed_forward, self.config.hidden_size
            flops += 2 * hidden * attention.head_dim * (2 * attention.num_heads + 2 * attention.num_kv_heads)
            passed = 1
            if isinstance(feed_forward, Experts):
                passed = feed_forward.chosen
                flops += 2 * hidden * feed_forward.count
            flops += passed * 6 * hidden * feed_forward.intermediate_size
        return flops

    @cached_property
    def head_row_flops(self) -> int:
        return 2 * self.config.vocab_size * self.config.hidden_size

    @cached_property
    def key_flops(self) -> int:
        """One row's attention to one key, in one layer: its score, and its value's share of the sum."""
        return 4 * self.config.num_heads * self.config.head_dim

    @cached_property
    def _windows(self) -> list[tuple[int, int]]:
        """(window, how many layers have it)."""
        return [(window or self.config.max_position, layers) for window, layers in Counter(self.config.windows).items()]

    def work(self, step: Iterable[Rows]) -> Work:
        """Of the rows that all sequences enter together."""
        rows = logits = keys = seen = 0
        for one in step:
            rows += one.count
            logits += one.logits
            for window, layers in self._windows:
                # The first `short` rows see all that is before them and themselves, the others a whole window.
                short = min(one.count, max(0, window - one.context))
                keys += layers * (short * one.context + short * (short + 1) // 2 + (one.count - short) * window)
                seen += layers * (one.count + min(one.context, window - 1))
        if not rows:
            return Work(0, 0, 0, 0, 0)
        return Work(
            self.layer_bytes(rows) + self.head_bytes * bool(logits),
            self.entry_bytes * seen / self.config.num_layers,
            self.row_flops * rows,
            self.key_flops * keys,
            self.head_row_flops * logits,
        )


def _part(name: str) -> str:
    """Of a matrix: whether it is outside of the layers, an expert's, or read by every step."""
    return "outer" if not name.startswith("layers.") else "experts" if ".experts." in name else "dense"


class Predictor:
    """Seconds of a step: each kind of work at a price of its own, per byte or FLOP.

    Prices are never negative, so more work never takes less time, whatever noise they were fitted to.
    """

    def __init__(self, cost: Cost, prices: Work) -> None:
        self.cost, self.prices = cost, prices

    @classmethod
    def fit(cls, cost: Cost, samples: Sequence[tuple[Sequence[Rows], float]]) -> "Predictor":
        """From steps and the seconds they took: least squares of relative errors, so that short steps count too."""
        work = np.array([cost.work(step) for step, _ in samples], float)
        scale = np.maximum(work.max(0), 1.0)
        seconds = np.maximum([taken for _, taken in samples], 1e-9)
        prices = _nonnegative_least_squares(work / scale / seconds[:, None], np.ones(len(samples)))
        return cls(cost, Work(*(prices / scale).tolist()))

    def seconds(self, step: Iterable[Rows]) -> float:
        return sum(amount * price for amount, price in zip(self.cost.work(step), self.prices, strict=True))


class Correction:
    """A factor on predicted seconds that most steps stay below, followed as the machine changes.

    Of the logarithm of measured over predicted it keeps a running mean and a running mean deviation, and the factor is
    two deviations above the mean: what TCP does with round trips (Jacobson 1988, appendix A), in logarithms, so that
    twice as fast and twice as slow weigh the same. It begins with more deviation than a quiet machine has: the first
    chunks are rather too short. It cannot run away: both are averages of what was seen, and one step counts as a factor
    of two at most, however long it was held up. Only the whole is corrected, not each price: consecutive steps are too
    much alike to tell prices apart.
    """

    GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 16, 2.0
    MOST = math.log(2)

    def __init__(self) -> None:
        self._mean, self._deviation = 0.0, 0.15

    @property
    def factor(self) -> float:
        return math.exp(self._mean + self._margin)

    @property
    def _margin(self) -> float:
        return self.DEVIATIONS * self._deviation

    def observe(self, predicted: float, measured: float) -> None:
        """A step was predicted to take so many seconds, this factor included, and took so many."""
        surprise = math.log(max(measured, 1e-9)) - math.log(max(predicted, 1e-9)) + self._margin
        surprise = min(max(surprise, -self.MOST), self.MOST)
        self._mean += self.GAIN * surprise
        self._deviation += self.DEVIATION_GAIN * (abs(surprise) - self._deviation)


def _nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |a x - b|: with a handful of columns, the best of all choices of which are not 0."""
    best, least = np.zeros(a.shape[1]), float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for chosen in combinations(range(a.shape[1]), size):
            found = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            error = float(np.sum((a[:, chosen] @ found - b) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(a.shape[1]), error
                best[list(chosen)] = found
    return best
