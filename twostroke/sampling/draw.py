"""The input and the output of sampling one row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.sampling.noise import Noise
from twostroke.sampling.params import SamplingParams


@dataclass(slots=True)  # not frozen: one is made for every token, and a frozen one takes four times as long
class Draw:
    """How to sample one row.

    Attributes:
        params: the request's sampling parameters.
        noise: the row's Gumbel noise.
        index: index of the token in the choice.
        prompt, output: token ids so far, for penalties.
        banned: ids that must not be sampled before min_tokens (ending tokens).
        allowed: bool [n] mask of the allowed ids; ids >= n are not allowed. None allows all.
        stats: whether `Sampled` carries log-probability, entropy and top probability.
        keep_logits: whether `Sampled` carries the row's logits.
    """

    params: SamplingParams
    noise: Noise
    index: int
    prompt: np.ndarray
    output: Sequence[int]
    banned: Sequence[int] = ()
    allowed: np.ndarray | None = None
    stats: bool = False
    keep_logits: bool = False

    @property
    def simple(self) -> bool:
        """Whether only a token is requested, and it depends only on the row's logits and the noise."""
        return self.params.simple and not self.stats and not self.keep_logits

    @property
    def reports(self) -> bool:
        """Whether the model's log-probabilities are requested."""
        return self.stats or self.params.logprobs is not None


@dataclass(frozen=True)
class Sampled:
    """A sampled token. Log-probabilities are the model's, in nats, before temperature and penalties.

    Attributes:
        id: the token's id; NO_TOKEN (`sampling.statistics`) if the model computed NaN or infinity.
        logprob: log-probability of the token; None unless `logprobs` or `stats` was requested.
        entropy: entropy of the model's distribution, in bits; None without `stats`.
        top_probability: probability of its most likely token; None without `stats`.
        top: the most likely ids with their log-probabilities; None without `logprobs`.
        logits: a copy of the row, [vocab] float32; None without `keep_logits`.
    """

    id: int
    logprob: float | None = None
    entropy: float | None = None
    top_probability: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    logits: np.ndarray | None = None
