"""How long a simulated step takes: by a roofline of peaks, or at prices that were measured on a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from twostroke.models.cost import Predictor, Rows, attended
from twostroke.study.plan.roofline import Roofline
from twostroke.study.plan.specification import VALUE_BYTES


class Taken(NamedTuple):
    """What a step takes on the device: seconds, FLOPs, and bytes of weights and KV read."""

    seconds: float
    flops: float
    bytes: float


def taken(*columns: np.ndarray) -> list[Taken]:
    """One for each step, from arrays of seconds, FLOPs and bytes."""
    return list(map(Taken._make, zip(*(column.tolist() for column in columns), strict=True)))


class StepCosts(Protocol):
    """What steps take.

    Attributes:
        host_s: seconds in which Python prepares a step, whatever its size.
        token_s: seconds in which Python handles one token.
        stalls: seconds that steps take besides, one after the other and again from the first; empty for none.
        peak: FLOPs and bytes that a device could do in a second; None if that is not known.
    """

    @property
    def peak(self) -> Taken | None: ...

    @property
    def host_s(self) -> float: ...

    @property
    def token_s(self) -> float: ...

    @property
    def stalls(self) -> Sequence[float]: ...

    def step(self, rows: Sequence[Rows]) -> Taken: ...

    def decode(self, contexts: np.ndarray, steps: int) -> list[Taken]:
        """Steps after each other in each of which some sequences make a token, the first after so many entries: [n]
        integers."""
        ...


def entries_seen(contexts: np.ndarray, steps: int, window: int | None) -> np.ndarray:
    """[steps] entries that single rows attend to, all together, themselves included; each step adds one to each."""
    if window is None:
        return int(contexts.sum()) + len(contexts) * np.arange(1, steps + 1)
    return np.minimum(contexts + np.arange(1, steps + 1)[:, None], window).sum(1)


def contexts_of(rows: Sequence[Rows]) -> np.ndarray | None:
    """The contexts of rows that all make a token; None if some do not."""
    if any(one.count != 1 or one.logits != 1 for one in rows):
        return None
    return np.array([one.context for one in rows], np.int64)


@dataclass(frozen=True)
class Priced:
    """Costs by a predictor, such as the one that a calibration on this machine gives.

    `entered_s`: seconds in which Python handles each token of a chunk.
    """

    predictor: Predictor
    host_s: float = 0.0
    token_s: float = 0.0
    entered_s: float = 0.0
    peak: Taken | None = None
    stalls: Sequence[float] = ()

    known: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]], compare=False, repr=False)

    def step(self, rows: Sequence[Rows]) -> Taken:
        if (contexts := contexts_of(rows)) is not None:
            return self.decode(contexts, 1)[0]
        work = self.predictor.cost.work(rows)
        entered = sum(one.count - one.logits for one in rows)
        flops = work.linear_flops + work.attention_flops + work.head_flops
        seconds = self.predictor.seconds(rows) + entered * self.entered_s
        return Taken(seconds, flops, work.weight_bytes + work.kv_bytes)

    def decode(self, contexts: np.ndarray, steps: int) -> list[Taken]:
        """What depends on contexts is linear in the entries that are read, so the rest is looked up."""
        cost, lanes = self.predictor.cost, len(contexts)
        if (known := self.known.get(lanes)) is None:
            rows = [Rows(1, 0, 1)] * lanes
            work = cost.work(rows)
            seconds = self.predictor.seconds(rows) - self.predictor.kv_price * work.kv_bytes
            self.known[lanes] = known = seconds, work.linear_flops + work.head_flops, work.weight_bytes
        seconds, flops, read = known
        seen = np.zeros(steps, np.int64)
        for window, layers in cost.windows:
            seen = seen + layers * entries_seen(contexts, steps, window)
        kv_bytes = cost.entry_bytes * seen / cost.config.num_layers
        return taken(seconds + self.predictor.kv_price * kv_bytes, flops + cost.key_flops * seen, read + kv_bytes)


class Peaks:
    """Costs by a roofline: those of `Roofline.step`, counted quicker.

    Steps of as many rows have the same products, so these are looked up. What attention takes is a sum over rows.
    """

    stalls: Sequence[float] = ()

    def __init__(self, roofline: Roofline, host_s: float = 0.0, token_s: float = 0.0) -> None:
        self.roofline, self.host_s, self.token_s = roofline, host_s, token_s
        self._products: dict[tuple[int, int], Taken] = {}
        flops: defaultdict[int | None, float] = defaultdict(float)
        read: defaultdict[int | None, float] = defaultdict(float)
        for kind in roofline.model.layers:
            flops[kind.window] += kind.count * kind.pair_flops / roofline.tp
            read[kind.window] += kind.count * kind.kv_values * VALUE_BYTES / min(roofline.tp, kind.kv_heads)
        self._windows = [(window, flops[window], read[window]) for window in flops]
        machine = roofline.machine
        self.peak = Taken(1.0, machine.flops[roofline.dtype], machine.bandwidth)
        self._rate = machine.flops[machine.dtype(("attention",))] * machine.compute
        self._bandwidth = machine.bandwidth * machine.memory_share

    def step(self, rows: Sequence[Rows]) -> Taken:
        flops = read = 0.0
        count, logits = sum(one.count for one in rows), sum(one.logits for one in rows)
        if count == logits == len(rows):  # as `decode` adds up, to the last bit
            for window, pair_flops, entry_bytes in self._windows:
                seen = sum(attended(one, window)[1] for one in rows)
                flops += pair_flops * seen
                read += entry_bytes * seen
        else:
            for one in rows:
                for window, pair_flops, entry_bytes in self._windows:
                    pairs, entries = attended(one, window)
                    flops += pair_flops * pairs
                    read += entry_bytes * entries
        products = self._of_products(count, logits)
        seconds = max(flops / self._rate, read / self._bandwidth)
        return Taken(products.seconds + seconds, products.flops + flops, products.bytes + read)

    def decode(self, contexts: np.ndarray, steps: int) -> list[Taken]:
        flops = read = np.zeros(steps)
        for window, pair_flops, entry_bytes in self._windows:
            seen = entries_seen(contexts, steps, window)
            flops = flops + pair_flops * seen
            read = read + entry_bytes * seen
        products = self._of_products(len(contexts), len(contexts))
        seconds = np.maximum(flops / self._rate, read / self._bandwidth)
        return taken(products.seconds + seconds, products.flops + flops, products.bytes + read)

    def _of_products(self, count: int, logits: int) -> Taken:
        """What a step's matrices and links take."""
        key = count, logits
        if (known := self._products.get(key)) is None:
            made = self.roofline.step([Rows(count, 0, logits)])
            parts = [one for one in made.parts if one.name != "scores"]
            seconds = made.link_s + sum(one.seconds for one in parts)
            known = Taken(seconds, sum(one.flops for one in parts), sum(one.bytes for one in parts))
            self._products[key] = known
        return known


@dataclass(frozen=True)
class WithHost:
    """Implements `StepSeconds` for the engine's forecast: what a step takes with what Python adds to it."""

    costs: StepCosts

    def seconds(self, step: Iterable[Rows]) -> float:
        rows = list(step)
        if not rows:
            return 0.0
        costs = self.costs
        return costs.step(rows).seconds + costs.host_s + costs.token_s * sum(one.logits for one in rows)
