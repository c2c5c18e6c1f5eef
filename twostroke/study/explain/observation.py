"""A plain request under observation: a program whose strokes also return queries and hidden states.

The logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens") is the head applied to the hidden state after
each layer. The head is trained for the last layer's states. What it says of earlier ones shows a direction, and is no
answer that the model could have given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled, Program
from twostroke.kv.cache import KVCache
from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import StepPredictor
from twostroke.sampling.params import SamplingParams
from twostroke.study.explain.attention import TokenAttention
from twostroke.study.explain.attention_maps import AttentionCollector, PromptAttention
from twostroke.study.explain.prefill import StoredKV, stored_kv
from twostroke.study.explain.shown_tokens import Candidate, Embedding, ShownToken, candidates, shown_tokens
from twostroke.study.explain.step_work import StepWork, step_work

TILE_ROWS = 64  # tokens whose queries and states are in memory at once
ATTENDED = 5  # entries shown
FIRST_VALUES = 6  # of a token's embedding


@dataclass(frozen=True)
class LensLayer:
    """The prediction of the head from one layer's hidden state."""

    layer: int  # 0 is the embedding, i is after i layers
    candidates: tuple[Candidate, ...]  # the likeliest tokens
    # probability, rank: those of the token that was sampled in the end; rank 1 is the likeliest
    probability: float
    rank: int


@dataclass(frozen=True)
class CacheSize:
    """A value's size at one moment."""

    entries: int
    bytes: int
    pages: int

    @classmethod
    def of(cls, kv: KVCache) -> "CacheSize":
        return cls(len(kv), kv.nbytes, kv.num_pages)


@dataclass(frozen=True)
class SampledRow:
    """The distribution that one token was sampled from."""

    candidates: tuple[Candidate, ...]
    token: Candidate
    lens: tuple[LensLayer, ...]
    attends: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, llm: LLM, run: Decoded, states: np.ndarray, attention: TokenAttention, count: int) -> "SampledRow":
        """The row of a decode's one token, with `count` candidates. `states`: [layers + 1, hidden] float32, its own."""
        id = run.tokens[0]
        scores = llm.model.compiled.rows_of(states).scores([id] * len(states), count)
        layers = tuple(
            LensLayer(i, candidates(llm.tokenizer, one), math.exp(one.logprob), one.rank)
            for i, one in enumerate(scores)
        )
        token = Candidate(id, llm.tokenizer.token_text(id), layers[-1].probability)
        return cls(layers[-1].candidates, token, layers, tuple(attention.most(ATTENDED)))


@dataclass(frozen=True)
class DecodeStep:
    """One step of a decode: a token goes in, the cache is read, a token comes out."""

    token_in: ShownToken  # the token that the step enters, with the index of its entry
    # before, after: the cache
    before: CacheSize
    after: CacheSize
    # the entries that its row attends to most, mean over layers with attention and heads: (index, weight)
    attends: tuple[tuple[int, float], ...]
    candidates: tuple[Candidate, ...]  # what could come next
    token_out: Candidate  # what was sampled, and its probability
    lens: tuple[LensLayer, ...]  # how it formed, layer by layer
    work: StepWork  # what the step reads and computes
    seconds: float | None  # the gap before this token in the request that was timed; None if that ended sooner


@dataclass(frozen=True)
class Observation:
    """Everything observed while one prompt was answered. `first` is the first token, sampled after the prefill."""

    embedding: Embedding
    attention: PromptAttention
    stored: StoredKV
    first: SampledRow
    steps: tuple[DecodeStep, ...]  # not timed yet
    finish_reason: str | None


def observe(
    llm: LLM,
    predictor: StepPredictor,
    tokens: Sequence[int],
    params: SamplingParams,
    layer: int,
    head: int | None,
    count: int,
    cache_salt: bytes = b"",
) -> Observation:
    """Answer a prompt and observe it; `count` candidates are kept of each row. Raises what `LLM.generate` raises.

    The prompt is prefilled in tiles of rows, so memory holds the queries and states of one tile.
    """

    def program() -> Program:
        heat, embedded = AttentionCollector(llm.config, len(tokens), layer, head), list[np.ndarray]()
        kv, states, attention = None, np.empty(0), None
        for start in range(0, len(tokens), TILE_ROWS):
            some, last = tokens[start : start + TILE_ROWS], start + TILE_ROWS >= len(tokens)
            made: Prefilled = yield Prefill(
                some, kv, logits="last" if last else "none", queries=len(some), states=len(some), fresh=True
            )
            assert made.states is not None, "the stroke has asked for them"
            kv, states = made.kv, made.states[:, -1].copy()
            heat.add(kv, made.queries)
            embedded.append(made.states[0, :, :FIRST_VALUES].copy())
            if last:
                attention = TokenAttention.of(kv, made.queries)
            del made
        assert kv is not None
        assert attention is not None, "a prompt has tokens"
        prompt = stored_kv(kv)
        run: Decoded = yield Decode(kv, max_tokens=1)
        first, steps = SampledRow.of(llm, run, states, attention, count), list[DecodeStep]()
        while run.finish_reason is None:
            before = run.kv
            run = yield Decode(before, max_tokens=1, queries=1, states=1)
            if not run.sampled:  # there was no room for it
                break
            assert run.states is not None, "the stroke has asked for them"
            row = SampledRow.of(llm, run, run.states[:, -1], TokenAttention.of(run.kv, run.queries), count)
            work = step_work(llm.model, predictor, [[SequenceRows(1, len(before), 1)]])
            (entered,) = shown_tokens(llm.tokenizer, [int(run.kv.token_array[-1])], len(before))
            sizes = CacheSize.of(before), CacheSize.of(run.kv)
            steps.append(DecodeStep(entered, *sizes, row.attends, row.candidates, row.token, row.lens, work, None))
        embedding = Embedding((len(tokens), states.shape[-1]), np.concatenate(embedded))
        return Observation(embedding, heat.result(), prompt, first, tuple(steps), run.finish_reason)

    request = Request(program, params, llm.tokenizer, len(tokens))
    request.cache_salt = cache_salt
    llm.engine.run([request])
    return request.result


def settled_after(layers: Sequence[LensLayer]) -> int | None:
    """Index of the first layer from which on the sampled token is the likeliest; None if it is not in the end."""
    unsettled = next((one.layer for one in reversed(layers) if one.rank != 1), -1)
    return unsettled + 1 if unsettled + 1 < len(layers) else None


def layer_name(after: int) -> str:
    """`LensLayer.layer` in words."""
    return f"layer {after - 1}" if after else "the embedding"
