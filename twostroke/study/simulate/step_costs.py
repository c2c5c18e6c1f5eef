"""How long a simulated step takes: by a roofline of peaks, or at prices that were measured on a machine."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostroke.models.cost import SequenceRows, attended, recurrent
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
    """Costs by a roofline: those of `Roofline.step`, counted faster.

    Steps of as many rows have the same products, so these are looked up. What attention takes is a sum over rows.
    """

    stalls: Sequence[float] = ()

    def __init__(self, roofline: Roofline, host_s: float = 0.0, token_s: float = 0.0) -> None:
        self.roofline, self.host_s, self.token_s = roofline, host_s, token_s
        self._products: dict[tuple[int, int], StepCost] = {}
        flops: defaultdict[int | None, float] = defaultdict(float)
        read: defaultdict[int | None, float] = defaultdict(float)
        for kind in roofline.model.layers:
            if kind.state is not None or kind.latent is not None:
                continue
            flops[kind.window] += kind.count * kind.pair_flops / roofline.tp
            read[kind.window] += kind.count * kind.entry_bytes(roofline.kv_read) / min(roofline.tp, kind.kv_heads)
        self._windows = [(window, flops[window], read[window]) for window in flops]
        self._states = [
            (state, layers / roofline.tp, layers / min(roofline.tp, state.num_k_heads))
            for state, layers in roofline.model.states.items()
        ]
        self._latent = [one for one in roofline.model.layers if one.latent is not None]
        machine = roofline.machine
        self.peak = StepCost(1.0, machine.flops[roofline.dtype], machine.bandwidth)
        self._rate = machine.flops[machine.dtype(("attention",))] * machine.compute
        self._bandwidth = machine.bandwidth * machine.memory_share

    def step(self, rows: Sequence[SequenceRows]) -> StepCost:
        flops = read = 0.0
        for window, pair_flops, entry_bytes in self._windows:
            pairs, entries = map(sum, zip(*(attended(one, window) for one in rows), strict=True))
            flops += pair_flops * pairs
            read += entry_bytes * entries
        for state, share, copies in self._states:
            for work in (recurrent(one, state) for one in rows):
                flops += share * work.flops
                read += copies * work.bytes
        for kind in self._latent:
            for one in rows:
                work, size = kind.mixing(one, self.roofline.kv_read)
                flops += kind.count * work / self.roofline.tp
                read += kind.count * size
        products = self._of_products(sum(one.count for one in rows), sum(one.logits for one in rows))
        seconds = max(flops / self._rate, read / self._bandwidth)
        return StepCost(products.seconds + seconds, products.flops + flops, products.bytes + read)

    def _of_products(self, count: int, logits: int) -> StepCost:
        """What a step's matrices and links take."""
        key = count, logits
        if (known := self._products.get(key)) is None:
            made = self.roofline.step([SequenceRows(count, 0, logits)])
            parts = [one for one in made.parts if one.name != "scores"]
            seconds = made.link_s + sum(one.seconds for one in parts)
            known = StepCost(seconds, sum(one.flops for one in parts), sum(one.bytes for one in parts))
            self._products[key] = known
        return known


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
