"""The seconds of a step, from prices of its work that are fitted to steps that were timed."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from twostroke.models.cost import CostModel, SequenceRows, WorkAmounts


class StepSeconds(Protocol):
    """Predicts how long steps of one model take."""

    def seconds(self, step: Iterable[SequenceRows]) -> float: ...


# Rows beyond these numbers have a price of their own. The time of a product is about max(bytes, FLOPs): reading weights
# hides the work of the first rows, and instructions that multiply many rows at once are used from some number on.
KNEES = (1, 4, 8)
# The same for the rows of one sequence, which attend to the same entries.
SEQUENCE_KNEES = (1, 4)


class StepAmounts(NamedTuple):
    """The amounts of work that determine a step's seconds. They never shrink when rows are added."""

    layer_bytes: float  # weights of the layers, read once
    head_bytes: float  # the head, read once if a row needs logits
    kv_bytes: float  # entries that each sequence attends to, read once
    rows: tuple[float, ...]  # FLOPs of the layers' matrices for rows beyond each of `KNEES`
    pairs: tuple[float, ...]  # FLOPs of attention for the rows of a sequence beyond each of `SEQUENCE_KNEES`
    head_flops: float

    @classmethod
    def of(cls, cost: CostModel, step: Iterable[SequenceRows]) -> "StepAmounts":
        step = list(step)
        work = cost.work(step)
        rows = sum(one.count for one in step)
        if not rows:
            return cls(0, 0, 0, (0.0,) * len(KNEES), (0.0,) * len(SEQUENCE_KNEES), 0)
        head = cost.head_bytes if work.head_flops else 0
        pairs = [0.0] * len(SEQUENCE_KNEES)
        for one in step:
            if one.count > SEQUENCE_KNEES[0]:
                flops = cost.work([one]).attention_flops
                for i, knee in enumerate(SEQUENCE_KNEES):
                    pairs[i] += flops * max(0, one.count - knee) / one.count
        return cls(
            work.weight_bytes - head,
            head,
            work.kv_bytes,
            tuple(cost.row_flops * float(max(0, rows - knee)) for knee in KNEES),
            tuple(pairs),
            work.head_flops,
        )

    @property
    def flat(self) -> tuple[float, ...]:
        """All of them in a row, each with a price."""
        return self.layer_bytes, self.head_bytes, self.kv_bytes, *self.rows, *self.pairs, self.head_flops


class StepPredictor:
    """Predicts the seconds of a step. Each amount of `StepAmounts` has a price in seconds per byte or FLOP.

    Prices are never negative, so more work never takes less time, even if the fitted measurements are noisy.
    """

    def __init__(self, cost: CostModel, prices: Sequence[float]) -> None:
        self.cost, self.prices = cost, tuple(prices)

    @classmethod
    def fit(cls, cost: CostModel, samples: Sequence[tuple[Sequence[SequenceRows], float]]) -> "StepPredictor":
        """Fit prices to (step, measured seconds) by least squares of relative errors, so that short steps count too."""
        amounts = np.array([StepAmounts.of(cost, step).flat for step, _ in samples], float)
        scale = np.maximum(amounts.max(0), 1.0)
        seconds = np.maximum([taken for _, taken in samples], 1e-9)
        prices = nonnegative_least_squares(amounts / scale / seconds[:, None], np.ones(len(samples)))
        return cls(cost, (prices / scale).tolist())

    def parts(self, step: Iterable[SequenceRows]) -> WorkAmounts:
        """Seconds of each kind of work. What reading hides has none."""
        amounts = StepAmounts.of(self.cost, step).flat
        layers, head, kv, *flops = (amount * price for amount, price in zip(amounts, self.prices, strict=True))
        rows, pairs = flops[: len(KNEES)], flops[len(KNEES) : -1]
        return WorkAmounts(layers + head, kv, sum(rows), sum(pairs), flops[-1])

    def seconds(self, step: Iterable[SequenceRows]) -> float:
        return sum(self.parts(step))


class StepCorrection:
    """A factor on predicted seconds that most steps stay below. It follows changes of the machine.

    It keeps a running mean and a running mean deviation of log(measured / predicted). The factor is two deviations
    above the mean, as in TCP's estimate of round-trip times (Jacobson 1988, appendix A), but in logarithms, so that
    twice as fast and twice as slow have the same weight. The initial deviation is larger than on a quiet machine: the
    first chunks are too short rather than too long. The factor cannot diverge: both numbers are averages, and one step
    counts as a factor of two at most, however long it took. Only the total is corrected, not each price: consecutive
    steps are too similar to tell prices apart.
    """

    GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 16, 2.0
    MAX_SURPRISE = math.log(2)

    def __init__(self) -> None:
        self._mean, self._deviation = 0.0, 0.15

    @property
    def factor(self) -> float:
        return math.exp(self._mean + self._margin)

    @property
    def _margin(self) -> float:
        return self.DEVIATIONS * self._deviation

    def observe(self, predicted: float, measured: float) -> None:
        """Update by one step: its predicted seconds, which include this factor, and its measured seconds."""
        surprise = math.log(max(measured, 1e-9)) - math.log(max(predicted, 1e-9)) + self._margin
        surprise = min(max(surprise, -self.MAX_SURPRISE), self.MAX_SURPRISE)
        self._mean += self.GAIN * surprise
        self._deviation += self.DEVIATION_GAIN * (abs(surprise) - self._deviation)


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 [columns] with the smallest |a x - b|, by active sets (Lawson and Hanson 1974, chapter 23)."""
    count = a.shape[1]
    x, used = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        gain = np.where(used, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= 1e-10:
            break
        used[gain.argmax()] = True
        while True:
            wanted = np.zeros(count)
            wanted[used] = np.linalg.lstsq(a[:, used], b, rcond=None)[0]
            negative = used & (wanted <= 0)
            if not negative.any():
                break
            part = (x[negative] / np.maximum(x[negative] - wanted[negative], 1e-300)).min()
            x = np.maximum(x + part * (wanted - x), 0)
            used &= x > 1e-14 * max(1.0, float(x.max()))
        x = wanted
    return x
