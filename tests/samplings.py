"""Ways to sample whose state has to go on where an answer is continued elsewhere."""

from typing import Any

import numpy as np


class Falling:
    """A constraint: each token's id is below the one before, and small ids end it."""

    def __init__(self) -> None:
        self.last = 384

    def mask(self) -> np.ndarray:
        return np.arange(384) < self.last

    def advance(self, token: int) -> None:
        assert token < self.last
        self.last = token

    @property
    def finished(self) -> bool:
        return self.last < 20


def samplings(min_tokens: int) -> dict[str, dict[str, Any]]:
    """Fields of `SamplingParams`; `min_tokens` of an answer that nearly every token would end."""
    return {
        "greedy": {},
        "sampled": {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        "penalized": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        "logprobs": {"logprobs": 3, "temperature": 0.8, "seed": 1},
        "min-tokens": {"min_tokens": min_tokens, "ignore_eos": False, "stop_token_ids": tuple(range(0, 384, 2))},
    }
