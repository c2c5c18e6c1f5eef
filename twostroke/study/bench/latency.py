"""Latency of both strokes: prompts and answers of given lengths, measured several times.

Every measurement takes new random tokens, so no prefix is known from an earlier one. Shapes are measured in turn,
round by round, so that a machine that slows down or speeds up does so for all of them. Medians are reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from twostroke.api.completion import Completion
from twostroke.api.llm import LLM
from twostroke.engine.timings import Pace, mean, percentile
from twostroke.errors import InvalidRequest
from twostroke.sampling.params import SamplingParams


@dataclass(frozen=True)
class BatchShape:
    """`batch` sequences at once, each a prompt and exactly `output_tokens` greedy tokens."""

    prompt_tokens: int
    output_tokens: int
    batch: int = 1


@dataclass(frozen=True)
class PromptSource:
    """The source of prompts: `text`, or random tokens of which the first `shared` are always the same."""

    seed: int = 0
    shared: int = 0
    text: str | None = None

    def make(self, llm: LLM, shape: BatchShape, round_number: int) -> list[list[int]]:
        """One prompt for each sequence of the batch."""
        if self.text is not None:
            return [llm.encode(self.text)] * shape.batch
        size, shared = shape.prompt_tokens, min(self.shared, shape.prompt_tokens)
        ordinary = np.setdiff1d(np.arange(llm.tokenizer.vocab_size), list(llm.tokenizer.special_ids))
        ordinary = ordinary[ordinary < llm.config.vocab_size]
        prefix = np.random.default_rng(self.seed).choice(ordinary, shared)
        fresh = np.random.default_rng([self.seed, round_number, size, shape.output_tokens, shape.batch])
        rest = fresh.choice(ordinary, (shape.batch, size - shared))
        return [[*prefix.tolist(), *row.tolist()] for row in rest]


@dataclass(frozen=True)
class Measurement(Pace):
    """One measurement. In a batch, TTFT, ITL and TPOT are over all sequences, and rates are of all together:
    prompt tokens computed / (last first token - arrival), decoded tokens / (last token - first token)."""

    cached_tokens: int = 0


@dataclass(frozen=True)
class Latency:
    """All measurements of one shape."""

    shape: BatchShape
    kv_bytes: int
    repeats: list[Measurement]

    def as_dict(self) -> dict[str, Any]:
        """The shape, the median of every measurement, and the raw numbers."""
        raw = [asdict(repeat) for repeat in self.repeats]
        medians = {}
        for name in Pace.__dataclass_fields__:
            values = [one[name] for one in raw if one[name] is not None]
            medians[name] = median(values) if values else None
        cached = max(one["cached_tokens"] for one in raw)
        return {
            **asdict(self.shape),
            "repeats": len(raw),
            **medians,
            "cached_tokens": cached,
            "kv_bytes": self.kv_bytes,
            "raw": raw,
        }


def measure(
    llm: LLM,
    shapes: Sequence[BatchShape],
    *,
    repeats: int,
    warmup: int,
    prompts: PromptSource,
    progress: Callable[[], None] = lambda: None,
) -> list[Latency]:
    """Run every shape `warmup` + `repeats` times, in turn. `progress` is called after each run.

    Raises:
        InvalidRequest: a shape does not fit the model's context or the KV pool.
    """
    for shape in shapes:
        tokens = shape.prompt_tokens + shape.output_tokens
        if tokens > llm.max_model_len:
            asked = f"{shape.prompt_tokens} prompt and {shape.output_tokens} output tokens"
            raise InvalidRequest(f"{asked} are {tokens}; model {llm.name} has room for {llm.max_model_len}")
    measured: list[list[Measurement]] = [[] for _ in shapes]
    for round_number in range(warmup + repeats):
        for shape, mine in zip(shapes, measured, strict=True):
            params = SamplingParams(max_tokens=shape.output_tokens, ignore_eos=True)
            answers = llm.generate(prompts.make(llm, shape, round_number), params)
            if round_number >= warmup:
                mine.append(summarize(answers))
            progress()
    entries = [one.batch * (one.prompt_tokens + one.output_tokens - 1) for one in shapes]
    return [
        Latency(shape, count * llm.pool.entry_bytes, mine)
        for shape, count, mine in zip(shapes, entries, measured, strict=True)
    ]


def summarize(answers: Sequence[Completion]) -> Measurement:
    """The pace of answers that were generated in one batch."""
    timings = [answer.timings for answer in answers]
    gaps = [gap for one in timings for gap in one.itls]
    arrival = min(one.arrival for one in timings)
    firsts, lasts = [one.tokens[0] for one in timings], [one.tokens[-1] for one in timings]
    decoded, decoding = sum(len(one.tokens) - 1 for one in timings), max(lasts) - min(firsts)
    computed = sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)
    return Measurement(
        ttft_s=mean([one.ttft for one in timings if one.ttft is not None]),
        itl_mean_s=mean(gaps),
        itl_p99_s=percentile(gaps, 99),
        tpot_s=mean([one.tpot for one in timings if one.tpot is not None]),
        prefill_tokens_per_second=computed / (max(firsts) - arrival),
        decode_tokens_per_second=decoded / decoding if decoded else None,
        cached_tokens=sum(answer.cached_tokens for answer in answers),
    )
