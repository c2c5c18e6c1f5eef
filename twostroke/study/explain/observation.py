"""A plain request under observation: a program whose strokes also return queries and hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled, Program
from twostroke.models.step_predictor import StepPredictor
from twostroke.sampling.params import SamplingParams
from twostroke.study.explain.attention import TokenAttention
from twostroke.study.explain.attention_maps import AttentionCollector, PromptAttention
from twostroke.study.explain.decode import DecodeStep, SampledRow, sampled_row, step_of
from twostroke.study.explain.prefill import StoredKV, stored_kv
from twostroke.study.explain.shown_tokens import Embedding, EmbeddingCollector

TILE_ROWS = 64  # tokens whose queries and states are in memory at once


@dataclass(frozen=True)
class Observation:
    """Everything observed while one prompt was answered. `first` is the first token, sampled after the prefill."""

    embedding: Embedding
    attention: PromptAttention
    stored: StoredKV
    first: SampledRow
    steps: tuple[DecodeStep, ...]
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
        heat, embedding = AttentionCollector(llm.config, len(tokens), layer, head), EmbeddingCollector()
        kv, states, attention = None, np.empty(0), None
        for start in range(0, len(tokens), TILE_ROWS):
            some, last = tokens[start : start + TILE_ROWS], start + TILE_ROWS >= len(tokens)
            made: Prefilled = yield Prefill(
                some, kv, logits="last" if last else "none", queries=len(some), states=len(some), fresh=True
            )
            assert made.states is not None, "the stroke has asked for them"
            kv, states = made.kv, made.states[:, -1].copy()
            heat.add(kv, made.queries)
            embedding.add(made.states)
            if last:
                attention = TokenAttention.of(kv, made.queries)
            del made
        assert kv is not None
        assert attention is not None, "a prompt has tokens"
        prompt = stored_kv(kv)
        run: Decoded = yield Decode(kv, max_tokens=1)
        first, steps = sampled_row(llm, run, states, attention, count), list[DecodeStep]()
        while run.finish_reason is None:
            before = run.kv
            run = yield Decode(before, max_tokens=1, queries=1, states=1)
            if not run.sampled:  # there was no room for it
                break
            assert run.states is not None, "the stroke has asked for them"
            row = sampled_row(llm, run, run.states[:, -1], TokenAttention.of(run.kv, run.queries), count)
            steps.append(step_of(llm, predictor, before, run.kv, row))
        return Observation(embedding.result(), heat.result(), prompt, first, tuple(steps), run.finish_reason)

    request = Request(program, params, llm.tokenizer, len(tokens))
    request.cache_salt = cache_salt
    llm.engine.run([request])
    return request.result
