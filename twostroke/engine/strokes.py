"""What a program may ask for: prefill, decode, and emit what it made.

A program is a generator. It yields a stroke and receives the stroke's result; it yields a list of strokes and
receives the list of their results, computed side by side. Its return value is the request's result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from twostroke.kv.attention import NO_QUERIES, Queries
from twostroke.kv.cache import KVCache
from twostroke.models.dropout import Dropout
from twostroke.sampling.draw import Sampled


@dataclass(frozen=True)
class Prefill:
    """Enter tokens. The result is a `KVCache`, or with logits="all" or `queries` a `Prefilled`.

    Attributes:
        tokens: what to enter, after the pending token of `after` if it has one.
        after: the value to extend; None begins at position 0.
        model: which model computes; None is the engine's default.
        logits: "last" keeps those after the last token as the value's tail; "all" returns every token's; "none"
            saves the head where only K and V matter.
        queries: of so many of the last tokens the result has the queries. A prefix hit leaves those to be computed.
        dropout: drops inputs of MLPs. What is computed so is nobody else's: no prefix index knows or gives it.
    """

    tokens: Sequence[int]
    after: KVCache | None = None
    model: str | None = None
    logits: Literal["last", "all", "none"] = "last"
    queries: int | None = None
    dropout: Dropout | None = None


@dataclass(frozen=True)
class Decode:
    """Sample tokens one by one until the request's own end (max_tokens, end token, stop string) or `until`.

    The result is a `Decoded`. The first token comes from the value's tail: its logits, or those after its pending
    token; where a slice cut the tail off, the last entry is computed again.

    Attributes:
        kv: what to continue; not empty.
        until: called with the run so far after each token; True ends the stroke (not the request).
        max_tokens: ends the stroke after so many tokens, besides the request's limit.
        model: which model decodes; None is the engine's default.
        emit: whether tokens go to the caller at once; a draft or a candidate does not.
        stream: tells the random streams of candidates apart.
        recompute: compute the last entry again with `model` even if another model's logits are at hand.
        stats: whether `Sampled` carries log-probability, entropy and top probability.
        keep_logits: whether `Sampled` carries the logits.
        queries: of so many of the last tokens entered the run has the queries.
        guesses: tokens that may come first. They are entered at once; those that turn out to be what is sampled stand,
            and the stroke ends with the first token that was not guessed.
    """

    kv: KVCache
    until: Callable[[Sequence[Sampled]], bool] | None = None
    max_tokens: int | None = None
    model: str | None = None
    emit: bool = True
    stream: int = 0
    recompute: bool = False
    stats: bool = False
    keep_logits: bool = False
    queries: int = 0
    guesses: Sequence[int] = ()


@dataclass(frozen=True)
class Emit:
    """Hand tokens decoded with emit=False to the caller. The result is True once the request has ended."""

    sampled: Sequence[Sampled]


@dataclass(frozen=True)
class Prefilled:
    """A prefill's value and what else was asked for.

    Attributes:
        logits: with logits="all" of every token entered, [n, vocab] float32; else [0, vocab].
        queries: of the last tokens entered, as many as were asked for and are there.
    """

    kv: KVCache
    logits: np.ndarray
    queries: Queries = NO_QUERIES


@dataclass(frozen=True)
class Decoded:
    """What a decode made. Its value ends with the last token pending; `queries` are those of its last entries."""

    kv: KVCache
    sampled: Sequence[Sampled] = field(default_factory=list)
    finish_reason: str | None = None  # the request's end ("stop" or "length"), or None: the stroke's own
    queries: Queries = NO_QUERIES

    @property
    def tokens(self) -> list[int]:
        return [s.id for s in self.sampled]

    @property
    def mean_logprob(self) -> float:
        """Of a stroke with `stats`. Raises ValueError without them."""
        known = [s.logprob for s in self.sampled if s.logprob is not None]
        if len(known) < len(self.sampled):
            raise ValueError("log-probabilities are not known: decode with stats=True")
        return sum(known) / max(1, len(known))


Stroke = Prefill | Decode | Emit
Program = Generator[Stroke | list[Stroke], Any, Any]
