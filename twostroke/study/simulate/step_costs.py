"""How long a simulated step takes: by a roofline of peaks, or at prices that were measured on a machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.roofline.roofline import Roofline


class StepCost(NamedTuple):
    """What a step takes on the device: seconds, FLOPs, and bytes of weights and KV read."""

    seconds: float
    flops: float
    bytes: float


class StepCostModel(Protocol):
    """What steps take.

    Attributes:
        host_s: seconds in which Python prepares a step, whatever its size.
        token_s: seconds in which Python handles one token.
        stalls: seconds that steps take besides, one after the other and again from the first; empty for none.
        peak: FLOPs and bytes that a device could do in a second; None if that is not known.
    """

    @property
    def peak(self) -> StepCost | None: ...

    @property
    def host_s(self) -> float: ...

    @property
    def token_s(self) -> float: ...

    @property
    def stalls(self) -> Sequence[float]: ...

    def step(self, rows: Sequence[SequenceRows]) -> StepCost: ...


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs by a predictor, such as the one that a calibration on this machine gives.

    `entered_s`: seconds in which Python handles each token of a chunk.
    """

    predictor: StepPredictor
    host_s: float = 0.0
    token_s: float = 0.0
    entered_s: float = 0.0
    peak: StepCost | None = None
    stalls: Sequence[float] = ()

    def step(self, rows: Sequence[SequenceRows]) -> StepCost:
        work = self.predictor.cost.work(rows)
        entered = sum(one.count - one.logits for one in rows)
        flops = work.linear_flops + work.attention_flops + work.head_flops
        seconds = self.predictor.seconds(rows) + entered * self.entered_s
        return StepCost(seconds, flops, work.weight_bytes + work.kv_bytes)


class RooflineCosts:
    """Costs by a roofline: those of `Roofline.step`."""

    stalls: Sequence[float] = ()

    def __init__(self, roofline: Roofline, host_s: float = 0.0, token_s: float = 0.0) -> None:
        self.roofline, self.host_s, self.token_s = roofline, host_s, token_s
        self.peak = StepCost(1.0, roofline.machine.flops[roofline.dtype], roofline.machine.bandwidth)
        self._products: dict[tuple[int, int], StepCost] = {}  # known sums: a million steps have few shapes

    def step(self, rows: Sequence[SequenceRows]) -> StepCost:
        key = sum(one.count for one in rows), sum(one.logits for one in rows)
        if (products := self._products.get(key)) is None:
            made = self.roofline.products(*key)
            self._products[key] = products = StepCost(made.seconds, made.flops, made.bytes)
        scores = self.roofline.attention((one, 1) for one in rows)
        seconds = products.seconds + scores.seconds
        return StepCost(seconds, products.flops + scores.flops, products.bytes + scores.bytes)


@dataclass(frozen=True)
class HostInclusiveSeconds:
    """Implements `StepSeconds` for the engine's forecast: what a step takes with what Python adds to it."""

    costs: StepCostModel

    def seconds(self, step: Iterable[SequenceRows]) -> float:
        rows = list(step)
        if not rows:
            return 0.0
        costs = self.costs
        return costs.step(rows).seconds + costs.host_s + costs.token_s * sum(one.logits for one in rows)
