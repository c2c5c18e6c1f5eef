"""The logit lens: the head applied to the hidden state after each layer.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens". The head is trained for the last
layer's states. What it says of earlier ones shows a direction, and is no answer that the model could have given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.api.llm import LLM
from twostroke.study.explain.shown_tokens import Candidate, candidates


@dataclass(frozen=True)
class LensLayer:
    """The prediction of the head from one layer's hidden state."""

    layer: int  # 0 is the embedding, i is after i layers
    candidates: tuple[Candidate, ...]  # the likeliest tokens
    # probability, rank: those of the token that was sampled in the end; rank 1 is the likeliest
    probability: float
    rank: int


def lens(llm: LLM, states: np.ndarray, token: int, count: int) -> tuple[LensLayer, ...]:
    """The lens of one row.

    Args:
        states: [layers + 1, hidden] float32, of `Output.states`.
        token: the token that was sampled from the last layer's row.
        count: candidates of each layer.
    """
    rows = llm.model.compiled.rows_of(states)
    scores = rows.scores([token] * len(states), count)
    return tuple(
        LensLayer(i, candidates(llm.tokenizer, score), math.exp(score.logprob), score.rank)
        for i, score in enumerate(scores)
    )


def settled_after(layers: Sequence[LensLayer]) -> int | None:
    """Index of the first layer from which on the sampled token is the likeliest; None if it is not in the end."""
    unsettled = next((one.layer for one in reversed(layers) if one.rank != 1), -1)
    return unsettled + 1 if unsettled + 1 < len(layers) else None


def layer_name(after: int) -> str:
    """`LensLayer.layer` in words."""
    return f"layer {after - 1}" if after else "the embedding"
