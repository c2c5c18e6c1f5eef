"""Seeded prompts of token ids. Their lengths are exact, and they share no prefix unless that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.perf.serving.lengths import Range, sharegpt, synthetic

MEASURED, WARMUP = 1, 2  # streams of random numbers: prompts of the warm-up are not measured again


@dataclass(frozen=True)
class Ask:
    """One request: greedy, exactly `output_tokens` long."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """How requests are drawn.

    Attributes:
        requests: how many.
        inputs, outputs: tokens of prompts (after their prefix) and answers; None for lengths as in ShareGPT.
        prefix_tokens: how many first tokens all prompts of a group share.
        groups: how many prefixes there are; each prompt takes one at random.
        seed: of everything. The same seed gives the same prompts, which a server's prefix cache may remember.
    """

    requests: int
    inputs: Range | None
    outputs: Range | None
    prefix_tokens: int = 0
    groups: int = 1
    seed: int = 0

    def make(self, ordinary: Sequence[int], stream: int = MEASURED, count: int | None = None) -> list[Ask]:
        """The requests, of ids from `ordinary`."""
        count, rng = self.requests if count is None else count, np.random.default_rng([self.seed, stream])
        if self.inputs is None or self.outputs is None:
            sizes = sharegpt(count, rng)
        else:
            sizes = synthetic(count, self.inputs, self.outputs, rng)
        prefixes = rng.choice(ordinary, (self.groups, self.prefix_tokens))
        chosen = rng.integers(self.groups, size=count)
        return [
            Ask([*prefixes[group].tolist(), *rng.choice(ordinary, size).tolist()], int(output))
            for group, (size, output) in zip(chosen, sizes, strict=True)
        ]
