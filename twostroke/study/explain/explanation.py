"""One prompt explained: a value that the terminal, JSON and the page show.

The prompt is answered twice: once with everything observed, and once as a plain request, which is timed, because
watching takes time. Both draw the same tokens, as every schedule does.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.calibration import calibrate
from twostroke.errors import InvalidRequest
from twostroke.methods import Method, Prompt
from twostroke.models.step_predictor import StepPredictor
from twostroke.sampling.params import SamplingParams
from twostroke.study.explain.attention import check_index, chosen_layer
from twostroke.study.explain.attention_maps import PromptAttention
from twostroke.study.explain.cache_comparison import CacheComparison, compare_with_cache, run_with_cache
from twostroke.study.explain.cache_map import CacheMap, cache_map
from twostroke.study.explain.observation import DecodeStep, LensLayer, observe
from twostroke.study.explain.prefill import PrefillExplanation, attended_pairs, layer_shapes
from twostroke.study.explain.shown_tokens import Embedding, ShownToken, shown_tokens
from twostroke.study.explain.step_work import prefill_steps, step_work

MAX_NAIVE_TOKENS = 8192  # tokens that the naive way computes; at least one step runs
CANDIDATES = 5


@dataclass(frozen=True)
class ModelFacts:
    """The model and what computes it. `recurrent`: how many of its layers have a state in place of attention."""

    name: str
    layers: int
    recurrent: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    backend: str
    kv_dtype: str
    exact: bool
    threads: int


@dataclass(frozen=True)
class Explanation:
    """The whole explanation of a prompt."""

    model: ModelFacts
    prompt: str  # the text as it was given; tokens: what the model was given, chat template and all
    tokens: tuple[ShownToken, ...]
    # index of the first token of the user's own words, and of the first one behind them; None without a chat
    turn: tuple[int, int] | None
    embedding: Embedding
    prefill: PrefillExplanation
    attention: PromptAttention
    lens: tuple[LensLayer, ...]  # how the first token formed, layer by layer
    decode: tuple[DecodeStep, ...]  # the steps after the first token
    text: str  # the answer
    finish_reason: str | None  # why it ended
    timed_alike: bool  # whether the request that was timed made the same tokens
    # the first tokens of the answer with and without the cache; None if not asked for, or if the pool has no room for
    # both values
    both_ways: CacheComparison | None
    method: CacheMap | None  # what a technique does to the cache; None for the plain request


@dataclass(frozen=True)
class ExplainOptions:
    """What an explanation shows."""

    layer: int | None = None  # whose attention and shapes; None is the middle one of those with attention
    head: int | None = None  # None is the mean over heads
    naive: int = 8  # tokens that are also made without the cache; 0 for none
    method: Method | None = None  # a technique whose caches are shown
    predictor: StepPredictor | None = None  # what steps take; None times some first
    cache_salt: bytes = b""  # of the requests that it makes (`Request.cache_salt`)


class GivenAnswer:
    """A constraint that allows the tokens of an answer that was made before, one after another."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._left = list(reversed(answer))

    def mask(self) -> np.ndarray:
        return np.arange(self._left[-1] + 1) == self._left[-1]

    def advance(self, token: int) -> None:
        self._left.pop()

    @property
    def finished(self) -> bool:
        return not self._left


def explain(
    llm: LLM,
    prompt: str,  # its text; tokens: its ids, which may have a chat template around it
    tokens: Sequence[int],
    params: SamplingParams,  # how its answer is sampled
    aspects: ExplainOptions | None = None,  # what is shown
    answer: Sequence[int] = (),  # tokens that were made before, to explain these and no other answer
) -> Explanation:
    """Answer a prompt and show how.

    Raises:
        InvalidRequest: no such layer or head, a recurrent layer, an empty prompt, or a companion that the technique
            needs is missing.
        ContextLengthExceeded: the prompt leaves no room for an answer.
    """
    aspects = aspects or ExplainOptions()
    config, tokenizer = llm.config, llm.tokenizer
    layer = chosen_layer(config, aspects.layer)
    if aspects.head is not None:
        check_index("head", aspects.head, config.num_heads)
    if not tokens:
        raise InvalidRequest("the prompt is empty: give at least one token")
    llm.model.require_room(len(tokens))
    if aspects.method is not None:
        llm.require_method(aspects.method)
    if answer:
        params = replace(params, max_tokens=len(answer), constraint=lambda: GivenAnswer(answer))
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    predictor = aspects.predictor or calibrate(llm.model)
    seen = observe(llm, predictor, tokens, params, layer, aspects.head, CANDIDATES, aspects.cache_salt)
    made = (seen.first.token.id, *(step.token_out.id for step in seen.steps))
    timed, _ = run_with_cache(llm, tokens, params, aspects.cache_salt)
    seconds = [*timed.seconds[1:], *[None] * len(made)]
    steps = tuple(replace(step, seconds=taken) for step, taken in zip(seen.steps, seconds, strict=False))
    turn = Prompt(tokens, tokenizer).turn
    chunks = prefill_steps(len(tokens), llm.engine.config.max_step_tokens)
    prefill = PrefillExplanation(
        layer,
        layer_shapes(config, layer, len(tokens), len(tokens)),
        attended_pairs(config, layer, len(tokens)),
        seen.stored,
        step_work(llm.model, predictor, chunks),
        len(chunks),
        timed.seconds[0],
        seen.first.attends,
        seen.first.candidates,
        seen.first.token,
    )
    return Explanation(
        model_facts(llm),
        prompt,
        shown_tokens(tokenizer, tokens),
        None if turn is None else (turn.start, turn.stop),
        seen.embedding,
        prefill,
        seen.attention,
        seen.first.lens,
        steps,
        tokenizer.decode(made),
        seen.finish_reason,
        timed.tokens == made,
        _both_ways(llm, tokens, params, min(aspects.naive, len(made))),
        None if aspects.method is None else cache_map(llm, Prompt(tokens, tokenizer), params, aspects.method),
    )


def _both_ways(llm: LLM, tokens: Sequence[int], params: SamplingParams, steps: int) -> CacheComparison | None:
    steps = min(steps, max(1, MAX_NAIVE_TOKENS // len(tokens)))
    pages = llm.pool.geometry.num_pages(len(tokens) + steps, llm.pool.page_size, len(tokens))
    if not steps or 2 * pages > llm.pool.num_pages:
        return None
    return compare_with_cache(llm, tokens, params, steps)


def model_facts(llm: LLM) -> ModelFacts:
    """Describe an open model."""
    config, backend = llm.config, llm.backend
    return ModelFacts(
        llm.name,
        config.num_layers,
        len(config.state_layers),
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        backend.label,
        llm.pool.geometry.kv_dtype,
        backend.exact,
        backend.threads,
    )


def as_json(value: Any) -> Any:
    """An explanation, or a part of it, as JSON has it. A float32 is written with the digits that tell its bits."""
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return [as_json(one) for one in value]
    if isinstance(value, tuple | list):
        return [as_json(one) for one in value]
    if isinstance(value, np.floating):
        return float(str(value)) if np.isfinite(value) else None
    return value
