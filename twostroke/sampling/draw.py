"""What is asked of a row of logits, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.sampling.noise import Noise
from twostroke.sampling.params import SamplingParams


@dataclass(frozen=True)
class Draw:
    """One row to sample.

    Attributes:
        params: its request's.
        noise: what draws it.
        index: its token's, of the choice's.
        prompt, output: int token ids so far, for penalties.
        banned: ids that may not be sampled (ending tokens before min_tokens).
        allowed: bool [n], the only ids that may be; None for all.
        stats: whether log-probability, entropy and top probability are wanted.
        keep_logits: whether the row's logits are wanted.
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
        """Whether a token is all that is asked for, and follows from the row's logits and the noise."""
        return self.params.simple and not self.stats and not self.keep_logits

    @property
    def reports(self) -> bool:
        """Whether log-probabilities of the model's own are asked for."""
        return self.stats or self.params.logprobs is not None


@dataclass(frozen=True)
class Sampled:
    """A sampled token. Log-probabilities are the model's own, before temperature and penalties.

    Attributes:
        logprob: None unless alternatives or stats were asked for, as the likeliest token is found without it.
        entropy: of the model's distribution, in bits; None unless asked for.
        top_probability: of its most likely token.
        top: the most likely ids with their log-probabilities.
        logits: [vocab] float32, a copy.
    """

    id: int
    logprob: float | None = None
    entropy: float | None = None
    top_probability: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    logits: np.ndarray | None = None
