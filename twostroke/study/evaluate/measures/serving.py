"""What a method's kept KV does for a server: an answer alone, sixteen at once, and as many as the pool has room for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Program, driven
from twostroke.engine.timings import Pace
from twostroke.errors import KVError, OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.contenders import Contender
from twostroke.study.evaluate.measure import Case, Comparison, Measure, Metric, Record, RecordsByMeasure

TOKENS = 32  # of each answer, end tokens or not
SEVERAL, MOST = 16, 256  # answers at once; most of a full pool


class Serving(Measure):
    """The first item of each batch, with every method: what it decodes from is copied, page by page, and decoded."""

    name = "serving"
    metrics = (
        Metric("ttft_alone_s", "TTFT alone", "seconds", "first token - arrival, with nothing else running"),
        Metric("itl_1_s", "ITL, 1 answer", "seconds", f"mean gap between {TOKENS} tokens, with nothing else running"),
        Metric("itl_16_s", f"ITL, {SEVERAL} answers", "seconds", f"the same, of {SEVERAL} answers side by side"),
        Metric("answers_at_once", "answers in the pool", "count", f"for which the pool has room, {MOST} at most"),
        Metric("full_rate", "tokens/s, full pool", "rate", "tokens of all of them / time, behind their first tokens"),
    )
    headlines = ("ttft_alone_s", "itl_1_s", "itl_16_s", "full_rate")
    blind = (
        "Answers decode from copies of one item's value, so prefills take no part in rates, and what a method drops or "
        "computes again in mid-answer is not seen. While it prefills, a method needs more room than an answer takes "
        "later. Pages of heads that see less are counted as the pool holds them."
    )

    def measure(
        self, comparison: Comparison, cases: Sequence[Case], known: Sequence[RecordsByMeasure]
    ) -> list[dict[str, Record]]:
        nothing: Record = dict.fromkeys(metric.key for metric in self.metrics)
        return [
            {one.name: nothing | (served(comparison, one, case) if not index else {}) for one in comparison.contenders}
            for index, case in enumerate(cases)
        ]


def served(comparison: Comparison, contender: Contender, case: Case) -> Record:
    """One method's record of an item. Copies need layers of one kind: elsewhere only times alone are known."""
    comparison.clear_prefix_indexes()
    seen: list[Decode] = []
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    (request,) = comparison.run([lambda: first_decode(contender.method.program(case.prompt), seen)], [params])
    comparison.clear_prefix_indexes()
    pace = Pace.of(request.timings, 0)
    record: Record = {"ttft_alone_s": pace.ttft_s, "itl_1_s": pace.itl_mean_s}
    stroke, pool = seen[0], seen[0].kv.pool
    try:
        free = pool.num_free
        copies = [copied(stroke.kv)]
    except (KVError, OutOfPages):
        return record
    growth = pool.geometry.num_pages(TOKENS, pool.page_size) + 1
    room = pool.num_free // (free - pool.num_free + growth)  # besides the first
    while len(copies) < SEVERAL and len(copies) <= room:
        copies.append(copied(stroke.kv))
    if len(copies) == SEVERAL:
        requests = decoded(comparison, stroke, copies, params)
        record["itl_16_s"] = float(np.mean([gap for one in requests for gap in one.timings.itls]))
    while len(copies) < MOST and len(copies) <= room:
        copies.append(copied(stroke.kv))
    requests = decoded(comparison, stroke, copies, params)
    began = min(one.timings.tokens[0] for one in requests)
    ended = max(one.timings.tokens[-1] for one in requests)
    tokens = sum(len(one.timings.tokens) - 1 for one in requests)
    return record | {"answers_at_once": len(copies), "full_rate": tokens / (ended - began)}


def first_decode(program: Program, seen: list[Decode]) -> Program:
    """The same program, which notes its first decode. A preempted one notes it again, and only that counts."""
    seen.clear()

    def answer(asked: Any) -> Program:
        decodes = [one for one in (asked if isinstance(asked, list) else [asked]) if isinstance(one, Decode)]
        seen.extend(() if seen else decodes[:1])
        return (yield asked)

    return driven(program, answer)


def copied(kv: KVCache) -> KVCache:
    """The same entries in pages of their own. Raises KVError where heads cannot be gathered."""
    geometry = kv.pool.geometry
    shape = (len(geometry.kv_layers), geometry.kv_heads or 0, len(kv))
    return kv.gather(np.broadcast_to(np.arange(len(kv)), shape))


def decoded(comparison: Comparison, stroke: Decode, copies: Sequence[KVCache], params: SamplingParams) -> list[Request]:
    """The requests that have decoded from every copy side by side, as the stroke does."""

    def program(kv: KVCache) -> Program:
        yield replace(stroke, kv=kv, until=None, max_tokens=None, emit=True, guesses=())

    return comparison.run([lambda kv=kv: program(kv) for kv in copies], [params] * len(copies))
