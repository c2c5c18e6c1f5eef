"""Log-probabilities of given texts: prompts, and continuations of prompts.

**The border.** A text and its continuation are encoded as one, and split behind as many tokens as the text alone has,
as lm_eval does: so the tokens are those that a model sees when it reads the whole. Whitespace at the end of the text is
moved to the continuation first, since most tokenizers join it with the word that follows. An empty text becomes BOS,
or EOS in a model without BOS, because a first token has no probability by itself. Token ids are taken as they are.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from twostroke.engine.engine import Engine
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.methods import Method, Plain
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.scores import TokenScore

TextOrTokens = str | Sequence[int]  # a prompt
PromptScores = tuple[TokenScore | None, ...]  # of every token of a prompt; None for the first one


@dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
        tokens: its token ids.
        logprobs: the log-probability of each, in nats, given the prompt and the tokens before it.
        greedy: whether greedy decoding after the prompt would have written exactly these tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    greedy: bool

    @property
    def sum(self) -> float:
        """The log-probability of the whole continuation, in nats."""
        return math.fsum(self.logprobs)


@dataclass(frozen=True)
class ScoredPair:
    """The token ids of a prompt and of its continuation. Both have at least one."""

    prompt: list[int]
    continuation: list[int]


def encode_pair(tokenizer: Tokenizer, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> ScoredPair:
    """Encode a prompt and its continuation by the rule at the border. Raises InvalidRequest if nothing is to score.

    A text that continues token ids is encoded by itself.
    """
    if isinstance(prompt, str) and isinstance(continuation, str):
        known = _encode(tokenizer, prompt.rstrip())
        rest = _encode(tokenizer, prompt + continuation)[len(known) :]
    else:
        known = _encode(tokenizer, prompt) if isinstance(prompt, str) else _ids(prompt)
        rest = tokenizer.encode(continuation, add_bos=False) if isinstance(continuation, str) else _ids(continuation)
    if not known:
        known = [_first_token(tokenizer)]
    if not rest:
        raise InvalidRequest("the continuation is empty: give at least one token to score")
    return ScoredPair(known, rest)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text with the tokens that begin a prompt, without those that would end it."""
    return tokenizer.encode(text, add_bos=tokenizer.add_bos)


def _ids(tokens: Iterable[Any]) -> list[int]:
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise InvalidRequest("a prompt or a continuation is a text or a list of token ids") from None


def _first_token(tokenizer: Tokenizer) -> int:
    """The token that stands for an empty text."""
    named = tokenizer.special_tokens
    text = named.get("bos_token") or named.get("eos_token")
    if text is None:
        raise InvalidRequest("the prompt is empty, and the model has no BOS and no EOS to begin with")
    return tokenizer.encode(text, add_bos=False)[0]


def score_program(pairs: Sequence[ScoredPair]) -> Program:
    """The program of one request: score pairs that mostly share their prompt. Its result is a list of `Score`.

    What all prompts have in common is entered once; then the rest of every pair extends it side by side.
    """
    prompts = [pair.prompt for pair in pairs]
    shared = (
        common_prefix_length(min(prompts), max(prompts)) if len(pairs) > 1 else 0
    )  # in lexical order these differ first
    kv: KVCache | None = (yield Prefill(pairs[0].prompt[:shared])) if shared else None
    strokes = [
        Prefill([*pair.prompt[shared:], *pair.continuation], kv, logprobs=0, scored_from=len(pair.prompt) - shared)
        for pair in pairs
    ]
    made: list[Prefilled] = yield list(strokes)
    return [_score(pair, prefilled.scores) for pair, prefilled in zip(pairs, made, strict=True)]


def score(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: TextOrTokens | Sequence[TextOrTokens],
    continuation: TextOrTokens | Sequence[TextOrTokens],
) -> Score | list[Score]:
    """Score one continuation, or a list of them; `LLM.score` describes the arguments."""
    prompts: Sequence[Any] | None = None if _is_single(prompt) else prompt
    others: Sequence[Any] | None = None if _is_single(continuation) else continuation

    def pair(one: Any, other: Any) -> ScoredPair:
        return encode_pair(tokenizer, one, other)

    if others is None:
        if prompts is not None:
            raise InvalidRequest("a list of prompts needs a list of continuations, one for each")
        return _run_groups(engine, tokenizer, [[pair(prompt, continuation)]])[0]
    if prompts is None:
        return _run_groups(engine, tokenizer, [[pair(prompt, other) for other in others]] if others else [])
    if len(prompts) != len(others):
        raise InvalidRequest(f"{len(prompts)} prompts and {len(others)} continuations: give one for each")
    return _run_groups(engine, tokenizer, [[pair(*both)] for both in zip(prompts, others, strict=True)])


def _is_single(value: Any) -> bool:
    """Whether this is one text or one list of token ids."""
    return isinstance(value, str) or (len(value) > 0 and not isinstance(value[0], str | Sequence | np.ndarray))


def _run_groups(engine: Engine, tokenizer: Tokenizer, groups: Sequence[Sequence[ScoredPair]]) -> list[Score]:
    """Score all pairs. A group shares its prompt and is one request."""
    requests = [
        Request(lambda group=group: score_program(group), SamplingParams(), tokenizer, len(group[0].prompt))
        for group in groups
    ]
    engine.run(requests)
    return [one for request in requests for one in request.result]


def scored_request(tokens: Sequence[int], params: SamplingParams, method: Method, tokenizer: Tokenizer) -> Request:
    """Make a plain request that scores its prompt, decodes nothing (`max_tokens` is 0), or both.

    Raises InvalidRequest for another technique: what it enters is not the prompt alone.
    """
    field = "max_tokens=0" if params.prompt_logprobs is None else "prompt_logprobs"
    if type(method) is not Plain:
        raise InvalidRequest(f"{field} cannot be combined with method {method.name}: leave one of them out")

    return Request(partial(_scored_program, tokens, params.prompt_logprobs), params, tokenizer, len(tokens))


def _scored_program(tokens: Sequence[int], logprobs: int | None) -> Program:
    prefilled: Prefilled | KVCache = yield Prefill(tokens, logprobs=logprobs)
    yield Decode(prefilled.kv if isinstance(prefilled, Prefilled) else prefilled)


def _score(pair: ScoredPair, scores: PromptScores) -> Score:
    known = [score for score in scores if score is not None]
    return Score(pair.continuation, [score.logprob for score in known], all(score.greedy for score in known))
