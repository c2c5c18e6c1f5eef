"""Tokens as readers see them: index, id, text and embedding; and a row's likeliest candidates, with probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.scores import TokenScore


@dataclass(frozen=True)
class ShownToken:
    """One token. `text`: special tokens by name, bytes that are not UTF-8 as \\xNN."""

    index: int
    id: int
    text: str


@dataclass(frozen=True)
class Candidate:
    """A token that could come next. The probability is the model's, before temperature, penalties and filters."""

    id: int
    text: str
    probability: float


def shown_tokens(tokenizer: Tokenizer, ids: Sequence[int], first: int = 0) -> tuple[ShownToken, ...]:
    """The tokens with indices from `first` on."""
    return tuple(ShownToken(first + i, id, tokenizer.token_text(id)) for i, id in enumerate(ids))


def candidates(tokenizer: Tokenizer, score: TokenScore) -> tuple[Candidate, ...]:
    """The likeliest tokens of a scored row, falling."""
    return tuple(Candidate(id, tokenizer.token_text(id), math.exp(logprob)) for id, logprob in score.top)


@dataclass(frozen=True)
class Embedding:
    """The rows of a prompt's tokens."""

    shape: tuple[int, int]  # tokens, hidden size
    values: np.ndarray  # the first values of each token's row, [n, few] float32
