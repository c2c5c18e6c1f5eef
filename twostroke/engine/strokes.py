"""The strokes that a program may yield: Prefill, Decode, Guess, Emit, Await and ReadWeights.

A program is a generator. It yields a stroke and receives the stroke's result, or yields a list of strokes and receives
the list of their results, computed side by side. Its return value is the request's result.
"""

import logging
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from twostroke.kv.attention import NO_QUERIES, Queries
from twostroke.kv.cache import KVCache
from twostroke.models.dropout import Dropout
from twostroke.sampling.draw import Sampled
from twostroke.sampling.scores import TokenScore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lookup:
    """Guesses of a decode: what followed its last few tokens before, in its text or in another of the same cache salt.

    Attributes:
        most: the most guesses of a step.
        judged: whether fewer are tried where fewer pay (`engine/guess_judge.py`).
    """

    most: int = 16
    judged: bool = True


@dataclass(frozen=True)
class GuessRound:
    """Guesses that a decode tried in one step, and how many of them stood."""

    guesses: Sequence[int]
    stood: int


@dataclass(frozen=True)
class Prefill:
    """Enter tokens. The result is a `KVCache`, or a `Prefilled` with logits="all" or what else it is to return.

    Attributes:
        tokens: the tokens to enter, after the pending token of `after` if it has one.
        after: the KV cache to extend; None begins at position 0.
        model: role of the model that computes; None is the engine's default.
        logits: "last" keeps the last token's logits as the value's tail; "all" returns every token's logits; "none"
            skips the head when only K and V are needed.
        queries: also return the query vectors of the last `queries` tokens. A prefix hit never covers these tokens.
        dropout: dropout on the inputs of MLPs. Its entries neither enter nor come from the prefix index.
        logprobs: also score the tokens: each one's log-probability, and this many most likely alternatives. A few rows
            at a time go through the head, so memory does not grow with the vocabulary times the prompt. A prefix hit
            never covers a position whose logits are needed; the positions before it may come from the index.
        scored_from: index in `tokens` of the first token to score.
        states: also return the hidden states of the last `states` tokens, of every layer. No prefix hit covers them.
        hidden: also return the hidden states of the last `hidden` tokens, behind the last layer and before the last
            norm. No prefix hit covers them. Not together with `logprobs` or logits="all".
        inputs: for a model that takes hidden states (`ModelConfig.takes_hidden`), those of the tokens to enter, of the
            model that it guesses for: [n, hidden] float32, as `hidden` returns them.
        fresh: compute every token, also those whose entries the prefix index or a store has.
        progress: called with the value so far when the prefill begins behind known entries, and after each chunk but
            the last, in the thread that steps: it must be quick.
    """

    tokens: Sequence[int]
    after: KVCache | None = None
    model: str | None = None
    logits: Literal["last", "all", "none"] = "last"
    queries: int | None = None
    dropout: Dropout | None = None
    logprobs: int | None = None
    scored_from: int = 0
    states: int | None = None
    hidden: int | None = None
    inputs: np.ndarray | None = None
    fresh: bool = False
    progress: Callable[[KVCache], None] | None = None


@dataclass(frozen=True)
class Decode:
    """Sample tokens until the request ends (max_tokens, end token, stop string) or the stroke does.

    The result is a `Decoded`. The first token is sampled from the value's tail: its logits, or those after its pending
    token. If the value has no tail (as after a slice), the last entry is computed again.

    Attributes:
        kv: the KV cache to continue; not empty.
        until: called after each token with the tokens sampled so far; True ends the stroke (not the request). A token
            has its id, and with `stats` the rest.
        max_tokens: ends the stroke after this many tokens; the request's limit holds as well.
        model: role of the model that decodes; None is the engine's default.
        emit: whether tokens go to the caller at once; False for a draft or a candidate.
        stream: number of the random stream, which distinguishes candidates.
        recompute: compute the last entry again with `model` even if another model's logits are available.
        stats: whether `Sampled` carries log-probability, entropy and top probability.
        keep_logits: whether `Sampled` carries the logits.
        queries: also return the query vectors of the last `queries` entered tokens.
        states: also return the hidden states of the last `states` entered tokens.
        guesses: guesses of the first tokens. They are entered at once; guesses that match the sampled tokens stay, and
            the stroke ends with the first sampled token that was not guessed.
        lookup: guess all along what followed the last few tokens before. Not with `guesses`, `queries` or `states`.
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
    states: int = 0
    guesses: Sequence[int] = ()
    lookup: Lookup | None = None


@dataclass(frozen=True)
class Guess:
    """Ask how many guesses of the next tokens pay now, if a model makes them. The result is `Guesses`."""

    source: str  # role of the model that will guess, if they pay
    most: int = 32  # the most guesses
    judged: bool = True  # whether fewer are told where fewer pay
    unread: Sequence[int] = ()  # the last tokens of the text, which that model reads before it guesses
    # guessed, stood: how many of the last guesses were entered, and how many of them were right
    guessed: int = 0
    stood: int = 0


@dataclass(frozen=True)
class Guesses:
    """How many guesses pay."""

    count: int  # 0: decode `max_tokens` without, and then ask again
    max_tokens: int | None = None


@dataclass(frozen=True)
class Emit:
    """Hand tokens decoded with emit=False to the caller. The result is True once the request has ended.

    Attributes:
        sampled: the tokens.
        finish_reason: that of the `Decoded` which they come from; "length" also ends the request.
    """

    sampled: Sequence[Sampled]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Await:
    """Wait for what other threads bring, such as a value from another process. The result is the future's.

    No step waits for it, and a choice that does nothing else does not count as running. The future's error is raised in
    the program.
    """

    # returns the future; it must not wait. The future is cancelled if the choice ends or is preempted first, and
    # `start` is called again when a preempted choice starts again.
    start: Callable[[], Future[Any]]


@dataclass(frozen=True)
class ReadWeights:
    """Read tensors of a model, for techniques that score by them. The result is a list of float32 arrays.

    They are what the checkpoint has, also where the backend computes with fewer bits. They are read in the thread that
    steps, so ask for a layer's at a time.
    """

    names: Sequence[str]  # Twostroke names (`models.tensor_shapes`), as "layers.3.o"
    model: str | None = None  # role of the model; None is the engine's default


@dataclass(frozen=True)
class Prefilled:
    """A prefill's KV cache, logits, queries and scores.

    Attributes:
        logits: with logits="all" those of every entered token, [n, vocab] float32; otherwise [0, vocab].
        queries: query vectors of the last entered tokens, up to the requested number.
        states: their hidden states, [layers + 1, n, hidden] float32 (see `Output` in `backends.interface`), or None.
        hidden: with `hidden`, [n, hidden] float32; otherwise None.
        scores: with `logprobs`, one for each token from `scored_from` on: its log-probability given all before it.
            None for the first token of a context, which nothing precedes.
    """

    kv: KVCache
    logits: np.ndarray
    queries: Queries = NO_QUERIES
    scores: tuple[TokenScore | None, ...] = ()
    states: np.ndarray | None = None
    hidden: np.ndarray | None = None

    @property
    def finite(self) -> bool:
        """Whether all logits and log-probabilities are numbers, as those of a sound model are."""
        scored = all(score is None or not math.isnan(score.logprob) for score in self.scores)
        return scored and bool(np.isfinite(self.logits.max(-1, initial=0)).all())


@dataclass(frozen=True)
class Decoded:
    """The result of a decode. The last token of `kv` is pending; `queries` and `states` are of its last entries.

    `rounds` are the guesses that `Decode.lookup` tried.
    """

    kv: KVCache
    sampled: Sequence[Sampled] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" or "length" if the request ended, None if only the stroke did
    queries: Queries = NO_QUERIES
    states: np.ndarray | None = None
    rounds: Sequence[GuessRound] = ()

    @property
    def tokens(self) -> list[int]:
        return [s.id for s in self.sampled]

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens, in nats. Raises ValueError for a stroke without `stats`."""
        known = [s.logprob for s in self.sampled if s.logprob is not None]
        if len(known) < len(self.sampled):
            raise ValueError("log-probabilities are not known: decode with stats=True")
        return sum(known) / max(1, len(known))


Stroke = Prefill | Decode | Guess | Emit | Await | ReadWeights
Program = Generator[Stroke | list[Stroke], Any, Any]


def driven(program: Program, answer: Callable[[Any], Program]) -> Program:
    """Run a program within another one: `answer` is given what it asks for, may yield strokes, and returns the result.

    No result stays here: it would keep pages that the program lets go of.
    """
    results: list[Any] = [None]
    try:
        while True:
            try:
                asked = program.send(results.pop())
            except StopIteration as stop:
                return stop.value
            results.append((yield from answer(asked)))
    finally:
        program.close()


def close_program(program: Program) -> None:
    """Close a program, which is code from outside: what it raises then would reach the wrong caller.

    A program that is running, since it cancels its own request, is closed by the driver.
    """
    if getattr(program, "gi_running", False):
        return
    try:
        program.close()
    except Exception:
        log.exception("a program failed while it was closed")
