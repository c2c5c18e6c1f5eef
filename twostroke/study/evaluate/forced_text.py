"""Teacher forcing of any method: the logits from which it would have sampled each token of a given text.

A program's decodes are answered with the tokens of the text, entered after the value that the program would decode
from. So a method is judged at every position of the same text, where two generated texts may only be compared up to
the first difference. Conditions (`until`) are asked as in a real decode, so a refresh or an eviction in mid-answer
comes where it would.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.engine.strokes import Decode, Decoded, Emit, Prefill, Prefilled, Program, Stroke, driven
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import NO_QUERIES
from twostroke.kv.entries import Tail
from twostroke.sampling.draw import Sampled
from twostroke.sampling.statistics import information, log_softmax, picked


@dataclass(frozen=True)
class ForcedLogits:
    """The logits of a method over a given text."""

    logits: np.ndarray  # [n, vocab] float32, row i before token i
    # entries, kv_bytes: of the value that its first decode starts from: what the method keeps of the prompt
    entries: int
    kv_bytes: int

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The log-probability of each of the n tokens."""
        return picked(log_softmax(self.logits), tokens).tolist()


def force_text(program: Program, tokens: Sequence[int], name: str = "the method") -> Generator[Any, Any, ForcedLogits]:
    """A program that drives another one over `tokens` (at least one). For `yield from`, or as a request's.

    Raises InvalidRequest for a program whose decodes are drafts or candidates (emit=False, or side by side), since its
    answer is not one continuation of one value; and for one that ends before the text. Errors call it `name`.
    """
    logits: list[np.ndarray] = []
    first: Decode | None = None
    answer, done = None, 0
    try:
        while done < len(tokens):
            try:
                asked = program.send(answer)
            except StopIteration:
                raise InvalidRequest(f"{name} ends after {done} of {len(tokens)} tokens") from None
            if isinstance(asked, Decode) and asked.emit:
                first = first or asked
                rows, answer = yield from _enter(asked, tokens[done:])
                logits.append(rows)
                done += len(answer.sampled)
            elif _decodes(asked):
                raise InvalidRequest(f"{name} decodes drafts or candidates: it cannot be led through a given text")
            else:
                answer = yield asked
    finally:
        program.close()
    assert first is not None
    return ForcedLogits(np.concatenate(logits), len(first.kv), first.kv.nbytes)


def with_stroke_times(program: Program, note: Callable[[Stroke, float], None]) -> Program:
    """Wrap a program without changing its result. `note` is called with each stroke and its seconds.

    Strokes side by side share their seconds: each is given an equal part.
    """

    def answer(asked: Any) -> Program:
        began = time.perf_counter()
        result = yield asked
        strokes = asked if isinstance(asked, list) else [asked]
        for stroke in strokes:
            note(stroke, (time.perf_counter() - began) / len(strokes))
        return result

    return driven(program, answer)


def _decodes(asked: Any) -> bool:
    return any(isinstance(stroke, Decode | Emit) for stroke in (asked if isinstance(asked, list) else [asked]))


def _enter(stroke: Decode, tokens: Sequence[int]) -> Generator[Any, Any, tuple[np.ndarray, Decoded]]:
    """The logits that the decode would see before each token, up to its end, and its result if it had sampled them."""
    kv, tail, tokens = stroke.kv, stroke.kv.tail, tokens[: stroke.max_tokens]
    rows: list[np.ndarray] = []
    queries = NO_QUERIES
    entering = list(tokens[:-1])
    if tail is not None and tail.logits is not None and not stroke.recompute:
        rows.append(tail.logits[None])
    elif kv.pending is None:  # as a decode does: the last entry is computed again
        entering.insert(0, kv.tokens[-1])
        kv = kv.without_last()
    if entering or kv.pending is not None:
        scored: Prefilled = yield Prefill(entering, kv, stroke.model, "all", stroke.queries)
        rows.append(scored.logits)
        kv, tail, queries = scored.kv, scored.kv.tail, scored.queries
    logits = np.concatenate(rows)
    sampled = _until(stroke, logits, tokens)
    assert tail is not None
    # All tokens but the last are entered; a condition may have ended the stroke before the text does.
    excess = len(tokens) - len(sampled)
    kv = kv[: len(kv) - excess].with_tail(Tail(tail.model, pending=sampled[-1].id))
    kept = logits[: len(sampled)].copy() if excess else logits  # a view would hold those of the whole text
    return kept, Decoded(kv, tuple(sampled), queries=queries.without_last(excess))


def _until(stroke: Decode, logits: np.ndarray, tokens: Sequence[int]) -> list[Sampled]:
    """The tokens as if sampled, up to and with the one after which the stroke's condition holds."""
    stats = stroke.stats
    sampled: list[Sampled] = []
    for token, raw in zip(tokens, logits, strict=True):
        logprob = entropy = top = None
        if stats:
            row = log_softmax(raw)
            logprob, entropy, top = float(row[token]), -float(information(row)) / math.log(2), math.exp(row.max())
        sampled.append(Sampled(token, logprob, entropy, top, logits=raw.copy() if stroke.keep_logits else None))
        if stroke.until is not None and stroke.until(sampled):
            break
    return sampled
