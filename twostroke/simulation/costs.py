"""How long a simulated step takes: by a roofline of peaks, or at prices that were measured on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.models.cost import Rows, StepSeconds, attended
from twostroke.planning.roofline import Roofline
from twostroke.planning.specification import VALUE_BYTES


class StepCosts(Protocol):
    """Seconds of steps.

    Attributes:
        host_s: seconds in which Python prepares a step, whatever its size.
        token_s: seconds in which Python handles one token.
    """

    @property
    def host_s(self) -> float: ...

    @property
    def token_s(self) -> float: ...

    def seconds(self, step: Sequence[Rows]) -> float:
        """Seconds on the device."""
        ...


@dataclass(frozen=True)
class Priced:
    """Costs by a predictor of any kind, such as the one that a calibration on this machine gives."""

    predictor: StepSeconds
    host_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, step: Iterable[Rows]) -> float:
        return self.predictor.seconds(step)


class Peaks:
    """Costs by a roofline: the seconds of `Roofline.step`, counted quicker.

    Steps of as many rows have the same products, so these are looked up. What attention takes is a sum over rows.
    """

    def __init__(self, roofline: Roofline, host_s: float = 0.0, token_s: float = 0.0) -> None:
        self.roofline, self.host_s, self.token_s = roofline, host_s, token_s
        self._others: dict[tuple[int, int], float] = {}
        flops: defaultdict[int | None, float] = defaultdict(float)
        read: defaultdict[int | None, float] = defaultdict(float)
        for kind in roofline.model.layers:
            flops[kind.window] += kind.count * kind.pair_flops / roofline.tp
            read[kind.window] += kind.count * kind.kv_values * VALUE_BYTES / min(roofline.tp, kind.kv_heads)
        machine = roofline.machine
        rate, bandwidth = machine.flops["bf16"] * machine.compute, machine.bandwidth * machine.memory_share
        self._windows = [(window, flops[window] / rate, read[window] / bandwidth) for window in flops]

    def seconds(self, step: Sequence[Rows]) -> float:
        compute = memory = 0.0
        count = logits = 0
        for one in step:
            count += one.count
            logits += one.logits
            for window, pair_s, entry_s in self._windows:
                pairs, entries = attended(one, window)
                compute += pair_s * pairs
                memory += entry_s * entries
        return self._products(count, logits) + max(compute, memory)

    def _products(self, count: int, logits: int) -> float:
        """Seconds of a step's matrices and links."""
        key = count, logits
        if (known := self._others.get(key)) is None:
            made = self.roofline.step([Rows(count, 0, logits)])
            self._others[key] = known = made.link_s + sum(one.seconds for one in made.parts if one.name != "scores")
        return known
