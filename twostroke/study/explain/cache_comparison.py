"""The same answer twice: with the cache, and without one, where every step computes K and V of all tokens again."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams


@dataclass(frozen=True)
class AnswerRun:
    """One run of the request, with or without the cache."""

    tokens: tuple[int, ...]  # what came out
    computed: int  # tokens whose K and V were computed, those of a token twice if it was computed twice
    seconds: tuple[float, ...]  # of each token: from the arrival to the first, then the gaps


@dataclass(frozen=True)
class CacheComparison:
    """A prompt of `prompt` tokens with `steps` tokens generated, without and with the cache."""

    prompt: int
    steps: int
    # naive, cached: what really ran
    naive: AnswerRun
    cached: AnswerRun
    # naive_formula, cached_formula: g p + g (g - 1) / 2 and p + g - 1, for p and g tokens
    naive_formula: int
    cached_formula: int
    # of what was computed; usual_ratio: of the usual estimates, g p + g^2 / 2 and p + g, which also count the last
    # token, though no step enters it
    ratio: float
    usual_ratio: float
    same_tokens: bool  # whether both ways made the same tokens
    largest_difference: float  # between the two ways' K and V, over all entries; 0 if all bits are the same


TimedRun = tuple[AnswerRun, KVCache]  # a run of the plain request, and its final KV value


def run_with_cache(llm: LLM, tokens: Sequence[int], params: SamplingParams, cache_salt: bytes = b"") -> TimedRun:
    """Prefill once, then decode: the plain request, with nothing observed and nothing found in a prefix index."""

    def program() -> Program:
        run: Decoded = yield Decode((yield Prefill(tokens, fresh=True)))
        return run.kv

    return _timed(llm, program, params, len(tokens), cache_salt)


def run_without_cache(llm: LLM, tokens: Sequence[int], params: SamplingParams) -> TimedRun:
    """Answer without a cache: for each token, prefill everything before it again."""

    def program() -> Program:
        entered = list(tokens)
        while True:
            kv = yield Prefill(entered, fresh=True)
            run: Decoded = yield Decode(kv, max_tokens=1)
            entered += run.tokens
            if run.finish_reason is not None:
                return run.kv

    return _timed(llm, program, params, len(tokens))


def _timed(
    llm: LLM, program: Callable[[], Program], params: SamplingParams, prompt: int, cache_salt: bytes = b""
) -> TimedRun:
    request = Request(program, params, llm.tokenizer, prompt)
    request.cache_salt = cache_salt
    llm.engine.run([request])
    times, kv = request.timings, request.result
    # Entries of a decode are its value's, without those that prefills made.
    prefilled = request.prefilled_tokens - request.cached_tokens
    made = tuple(token.id for token in request.events)
    decoded = len(kv) - prompt if prefilled == prompt else 0
    gaps = tuple(b - a for a, b in itertools.pairwise([times.arrival, *times.tokens]))
    return AnswerRun(made, prefilled + decoded, gaps), kv


def compare_with_cache(llm: LLM, tokens: Sequence[int], params: SamplingParams, steps: int) -> CacheComparison:
    """Make the first `steps` tokens of an answer both ways. `params` has a seed, so that both draw alike."""
    few = replace(params, max_tokens=steps)
    (cached, cached_kv), (naive, naive_kv) = run_with_cache(llm, tokens, few), run_without_cache(llm, tokens, few)
    p, g = len(tokens), len(naive.tokens)
    return CacheComparison(
        p,
        g,
        naive,
        cached,
        g * p + g * (g - 1) // 2,
        p + g - 1,
        naive.computed / cached.computed,
        (g * p + g * g / 2) / (p + g),
        naive.tokens == cached.tokens,
        largest_difference(naive_kv, cached_kv),
    )


def largest_difference(one: KVCache, other: KVCache) -> float:
    """The largest difference between K and V of two values, over the entries that both have."""
    found, count = 0.0, min(len(one), len(other))
    for layer in (layer for _, group in one.pool.geometry.kv_groups for layer in group.layers):
        mine, theirs = (kv.entries(layer)[:, :count] for kv in (one, other))
        if mine.tobytes() != theirs.tobytes():
            found = max(found, float(np.abs(mine.astype(np.float32) - theirs.astype(np.float32)).max(initial=0)))
    return found
