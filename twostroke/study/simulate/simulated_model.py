"""A compiled pass that computes nothing: a step takes the time that the cost model says."""

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from twostroke.backends.interface import START, STOP, ForwardOutput, RaggedBatch
from twostroke.models.config import ModelConfig
from twostroke.models.cost import SequenceRows
from twostroke.sampling.draw import Sampled
from twostroke.sampling.scores import TokenScore
from twostroke.study.simulate.step_costs import StepCost, StepCostModel
from twostroke.study.simulate.virtual_time import VirtualClock

HIDDEN = 1  # numbers of a hidden state, which are all 0
PassObserver = Callable[
    [float, float, Sequence[SequenceRows], StepCost], None
]  # when a step begins and ends, its rows, what it takes


@dataclass(frozen=True)
class SimulatedBackend:
    """The part of a `Backend` that engines read.

    `asynchronous`: whether the device computes while Python works (`engine/step_in_flight.py`).
    """

    asynchronous: bool
    failure: None = None
    name: str = "simulated"
    label: str = "simulated"
    exact: bool = True
    device: str = "virtual"
    takes_bias: bool = True


class NullLogits:
    """Implements `LazyLogits` by a number of rows."""

    __slots__ = ("_rows",)

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice) -> "NullLogits":
        return NullLogits(len(range(*rows.indices(self._rows))))

    def kept(self) -> "NullLogits":
        return self

    def read(self) -> np.ndarray:
        raise NotImplementedError("a simulation has no logits")

    def scores(self, ids: Sequence[int], count: int) -> list[TokenScore]:
        """Log-probabilities that differ from id to id and mean nothing: compression needs an order."""
        return [TokenScore(id, -float(id % 97), 1) for id in ids]

    def hidden_states(self) -> np.ndarray:
        return np.zeros((self._rows, HIDDEN), np.float32)

    @property
    def nbytes(self) -> int:
        return 0


class PendingTokens:
    """Implements `DrawnTokens`: they are there when the device has come so far."""

    __slots__ = ("_clock", "_sampled", "ready")

    def __init__(self, clock: VirtualClock, ready: float, sampled: list[Sampled]) -> None:
        self._clock, self.ready, self._sampled = clock, ready, sampled

    def __len__(self) -> int:
        return len(self._sampled)

    def read(self) -> list[Sampled]:
        self._clock.until(self.ready)
        return self._sampled


@dataclass
class SimulatedDevice:
    """`free_at`: when it has done all that it was given."""

    free_at: float = 0.0


class SimulatedModel:
    """Implements `CompiledModel`. It has a device, which works on one step after another; a companion shares it.

    A step occupies the device for the seconds of `costs.step`. Unless the device is asynchronous, the caller waits for
    it. Python adds `costs.host_s` to each step, and `costs.token_s` to each token. Every token is the last of the
    vocabulary, which prompts do not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        clock: VirtualClock,
        costs: StepCostModel,
        asynchronous: bool,
        watch: PassObserver | None = None,
    ) -> None:
        self.config, self._clock, self.costs = config, clock, costs
        self._asynchronous, self._watch = asynchronous, watch
        # steps: how many it has begun
        self.steps, self._device = 0, SimulatedDevice()
        self.token = Sampled(config.vocab_size - 1)
        self._right, self._luck = 1.0, random.Random(0)

    def companion(self, config: ModelConfig, costs: StepCostModel, right: float) -> "SimulatedModel":
        """A student or a draft on the same device. A share `right` of its tokens is what this model would say."""
        made = SimulatedModel(config, self._clock, costs, self._asynchronous, self._watch)
        made._device, made.token, made._right = self._device, self.token, right
        return made

    def forward(self, batch: RaggedBatch[np.ndarray], memory: Any) -> ForwardOutput:
        clock, costs, rows = self._clock, self.costs, rows_of(batch)
        clock.advance(costs.host_s)
        began = max(clock.now, self._device.free_at)
        taken = costs.step(rows)
        if costs.stalls:
            taken = taken._replace(seconds=taken.seconds + costs.stalls[self.steps % len(costs.stalls)])
        self.steps += 1
        self._device.free_at = ended = began + taken.seconds
        if not self._asynchronous:
            clock.until(ended)
        if self._watch is not None:
            self._watch(began, ended, rows, taken)
        states = None if batch.state_rows is None else np.zeros((1, len(batch.state_rows), HIDDEN), np.float32)
        return ForwardOutput(NullLogits(len(batch.wanted)), None, states)

    def sample(self, rows: Sequence[Any], draws: Sequence[Any]) -> PendingTokens:
        self._clock.advance(self.costs.token_s * len(rows))
        made = [self.token] * len(rows)
        if self._right < 1:
            made = [one if self._luck.random() < self._right else Sampled(one.id - 1) for one in made]
        return PendingTokens(self._clock, self._device.free_at, made)


def rows_of(batch: RaggedBatch[np.ndarray]) -> list[SequenceRows]:
    """Each sequence's share of a step. Without tables, its entries are at positions 0, 1, 2, ..., as those of plain
    requests are."""
    starts, wanted, positions = batch.row_starts, batch.wanted.tolist(), batch.positions
    below = [bisect_left(wanted, start) for start in starts]  # steps have few rows: faster than array operations
    counts = [stop - start for start, stop in pairwise(starts)]
    if batch.tables:
        held = [int((table[:, STOP] - table[:, START]).sum()) for table in batch.tables]
        before = [entries - count for entries, count in zip(held, counts, strict=True)]
    else:
        before = [int(positions[start]) for start in starts[:-1]]
    return [
        SequenceRows(count, context, after - first)
        for count, context, first, after in zip(counts, before, below, below[1:], strict=False)
    ]
