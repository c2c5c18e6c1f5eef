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


FIRST_VALUES = 6


@dataclass(frozen=True)
class Embedding:
    """The rows of a prompt's tokens."""

    shape: tuple[int, int]  # tokens, hidden size
    values: np.ndarray  # the first values of each token's row, [n, FIRST_VALUES] float32


class EmbeddingCollector:
    """Collects first values, tile by tile, of the states that a pass hands out."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._hidden = 0

    def add(self, states: np.ndarray) -> None:
        """`states`: [layers + 1, rows, hidden]; the first of them is the embedding."""
        self._hidden = states.shape[2]
        self._parts.append(states[0, :, :FIRST_VALUES].copy())

    def result(self) -> Embedding:
        values = np.concatenate(self._parts)
        return Embedding((len(values), self._hidden), values)
