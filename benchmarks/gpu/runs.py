"""How steps are timed: until their tokens are read, back to back, and on the device alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.card import Card, Ceilings
from benchmarks.gpu.steps import Part, Stepper
from twostroke.backends.interface import DrawnTokens, RaggedBatch

ENOUGH_S = 0.5  # of repeats of one kind
AHEAD_MS = 100.0  # the most that the host runs ahead of the device
Step = Sequence[Sequence[Part]]  # the passes of a step; a decode step is one pass, a chunked prefill several

DEFINITIONS = {
    "step_ms": "median wall time of a step, or of a whole prefill, until its tokens are read",
    "back_to_back_ms": "wall time of many in a row / their number; no tokens are read in between",
    "device_ms": "median time between events around it, launched while the device was kept busy before",
    "outside": "1 - device_ms / step_ms",
    "bytes, flops": "weights and KV that a step reads, and its operations (twostroke/models/cost.py); sums over passes",
    "intensity": "flops / bytes",
    "floor_ms": "sum over its passes of the larger of bytes / copy bandwidth and flops / best rate of torch.matmul",
    "of_floor": "floor_ms / step_ms",
    "ceilings": "measured in the same run: device-to-device copy, bytes read plus written; torch.matmul in bf16",
    "first_s": "the first run of the case: compiling and capturing",
}


class Runs:
    """Steps that are prepared, and launched in turn: what is timed is the backend, not the making of batches."""

    def __init__(self, stepper: Stepper, steps: Sequence[Step], follows: bool) -> None:
        """`follows`: whether a step can take the tokens of the one before, of as many sequences."""
        self.stepper, self.steps, self.follows = stepper, steps, follows
        self.draws = stepper.draws(max(len(parts) for step in steps for parts in step))
        self.fresh = [[stepper.batch(parts) for parts in step] for step in steps]
        self.following = [[following(batch) for batch in step] for step in self.fresh if follows]
        self._number = 0

    def launch(self, drawn: DrawnTokens | None = None) -> DrawnTokens:
        """Launch the next step; `drawn` has the tokens of the one before."""
        follows = self.follows and drawn is not None
        batches = self.following if follows else self.fresh
        made: DrawnTokens | None = None
        for batch in batches[self._number % len(batches)]:
            draws = self.draws[: len(batch.wanted)]
            made = self.stepper.launch(batch, draws, drawn if follows else None)
        self._number += 1
        assert made is not None
        return made

    def step(self) -> None:
        """Launch the next step and read its tokens."""
        self.launch().read()

    def work(self) -> list[tuple[float, float]]:
        """(bytes, FLOPs) of each pass of the middle step."""
        return [self.stepper.work(parts) for parts in self.steps[len(self.steps) // 2]]


def following(batch: RaggedBatch[np.ndarray]) -> RaggedBatch[np.ndarray]:
    """The same step with the tokens of the one before, of as many sequences."""
    return replace(batch, token_ids=-1 - np.arange(batch.num_rows))


def timed(card: Card, runs: Runs, repeats: int, ceilings: Ceilings) -> dict[str, Any]:
    """The figures of `DEFINITIONS`, from at most `repeats` steps of each kind."""
    (first,) = card.wall(runs.step, 1)
    warm = first if card.on_cpu else card.wall(runs.step, 2)[1]
    least = 1 if card.on_cpu else 3
    repeats = max(least, min(repeats, int(ENOUGH_S / warm)))
    taken = card.wall(runs.step, repeats)
    step_s = median(taken)
    on_device = card.on_device(runs.launch, min(2e3 * step_s, AHEAD_MS) + 1, max(least, repeats // 2))
    drawn = runs.launch()
    card.wait()
    began = time.perf_counter()
    for _ in range(repeats):
        drawn = runs.launch(drawn)
    drawn.read()
    card.wait()
    in_a_row = (time.perf_counter() - began) / repeats
    work = runs.work()
    size, flops = (sum(one) for one in zip(*work, strict=True))
    floor = sum(max(size / ceilings.bandwidth, flops / ceilings.flops) for size, flops in work)
    return {
        "step_ms": 1e3 * step_s,
        "back_to_back_ms": 1e3 * in_a_row,
        "device_ms": 1e3 * median(on_device),
        "outside": 1 - median(on_device) / step_s,
        "bytes": size,
        "flops": flops,
        "intensity": flops / size,
        "bytes_per_second": size / step_s,
        "flops_per_second": flops / step_s,
        "floor_ms": 1e3 * floor,
        "of_floor": floor / step_s,
        "first_s": first,
        "raw_step_s": taken,
        "raw_device_s": on_device,
    }
