"""Seeded requests of drawn lengths. Their prompts share no prefix unless that is asked for."""

from dataclasses import dataclass

import numpy as np

from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop
from twostroke.study.traffic.lengths import TokenRange, sharegpt, synthetic
from twostroke.study.traffic.requests import PromptPiece, Traffic, TrafficRequest


@dataclass(frozen=True)
class WorkloadSampler:
    """How requests are drawn.

    Attributes:
        requests: how many.
        inputs, outputs: tokens of prompts (after their prefix) and answers; None for lengths as in ShareGPT.
        prefix_tokens: how many first tokens all prompts of a group share.
        groups: how many prefixes there are; each prompt takes one at random.
        seed: of everything. The same seed gives the same prompts, which a server's prefix cache may remember.
    """

    requests: int
    inputs: TokenRange | None
    outputs: TokenRange | None
    prefix_tokens: int = 0
    groups: int = 1
    seed: int = 0

    def traffic(self, pattern: OpenLoop | ClosedLoop) -> Traffic:
        """The requests, at times of that pattern."""
        rng = np.random.default_rng([self.seed, 1])
        if self.inputs is None or self.outputs is None:
            sizes = sharegpt(self.requests, rng)
        else:
            sizes = synthetic(self.requests, self.inputs, self.outputs, rng)
        chosen = rng.integers(self.groups, size=self.requests).tolist()
        closed = isinstance(pattern, ClosedLoop)
        times = [0.0] * self.requests if closed else pattern.times(self.requests, self.seed)
        made: list[TrafficRequest] = []
        for i, (at, group, (size, output)) in enumerate(zip(times, chosen, sizes.tolist(), strict=True)):
            own = PromptPiece(self.groups + i, size)
            pieces = (PromptPiece(group, self.prefix_tokens), own) if self.prefix_tokens else (own,)
            made.append(TrafficRequest(at, pieces, output))
        return Traffic(made, pattern, self.seed)
