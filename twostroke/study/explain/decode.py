"""Stroke two, step by step: a token goes in, the cache is read, a token comes out."""

from dataclasses import dataclass

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.strokes import Decoded
from twostroke.kv.cache import KVCache
from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.explain.attention import TokenAttention
from twostroke.study.explain.lens import LensLayer, lens
from twostroke.study.explain.shown_tokens import Candidate, ShownToken, shown_tokens
from twostroke.study.explain.step_work import StepWork, step_work

ATTENDED = 5  # entries shown


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
class DecodeStep:
    """One step of a decode."""

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
class SampledRow:
    """The distribution that one token was sampled from."""

    candidates: tuple[Candidate, ...]
    token: Candidate
    lens: tuple[LensLayer, ...]
    attends: tuple[tuple[int, float], ...]


def sampled_row(llm: LLM, run: Decoded, states: np.ndarray, attention: TokenAttention, count: int) -> SampledRow:
    """Describe the one token of a decode. `states`: [layers + 1, hidden], of the row that it was sampled from."""
    id = run.tokens[0]
    made = lens(llm, states, id, count)
    token = Candidate(id, llm.tokenizer.token_text(id), made[-1].probability)
    return SampledRow(made[-1].candidates, token, made, tuple(attention.most(ATTENDED)))


def step_of(llm: LLM, predictor: StepPredictor, before: KVCache, after: KVCache, row: SampledRow) -> DecodeStep:
    """The step that entered one token, not timed yet."""
    entered = int(after.token_array[-1])
    return DecodeStep(
        shown_tokens(llm.tokenizer, [entered], len(before))[0],
        CacheSize.of(before),
        CacheSize.of(after),
        row.attends,
        row.candidates,
        row.token,
        row.lens,
        step_work(llm.model, predictor, [[SequenceRows(1, len(before), 1)]]),
        None,
    )
