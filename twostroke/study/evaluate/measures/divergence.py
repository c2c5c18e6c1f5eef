"""Distance to the baseline at every position of the baseline's own answer: what single tokens cannot show.

FARS 2026 (PTDO) judges by answers of a token or two, of which the first is full repetition's by construction. Here
every method is led through full repetition's answer, and its distribution compared before each of its tokens.
"""

from collections.abc import Sequence

import numpy as np

from twostroke.engine.strokes import Program
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.statistics import information, log_softmax, picked
from twostroke.study.evaluate.forced_text import force_text
from twostroke.study.evaluate.measure import KEPT, Case, Comparison, Measure, Metric, Record, RecordsByMeasure

ROWS = 64  # of logits compared at a time: 39 MB for each temporary at a vocabulary of 152,000


def compare(baseline: np.ndarray, mine: np.ndarray, following: Sequence[int]) -> np.ndarray:
    """Compare n rows of logits: surprise, KL from the baseline, and whether the likeliest token is the same; [3, n].

    Raises ValueError for other numbers of rows.
    """
    if not len(baseline) == len(mine) == len(following):
        raise ValueError(f"{len(baseline)}, {len(mine)} and {len(following)} rows cannot be compared")
    parts: list[np.ndarray] = []
    for start in range(0, len(following), ROWS):
        rows = slice(start, start + ROWS)
        p, q, words = baseline[rows], mine[rows], following[rows]
        log_q = log_softmax(q)
        surprise = -picked(log_q, words).astype(float)
        parts.append(np.stack([surprise, information(log_softmax(p), log_q), p.argmax(-1) == q.argmax(-1)]))
    return np.concatenate(parts, -1)


class Divergence(Measure):
    """KL(baseline || method) in nats, teacher-forced over the baseline's greedy answer."""

    name = "divergence"
    metrics = (
        Metric("kl", "KL by position", "curve", "KL(baseline || method) before each token of the baseline's answer"),
        Metric("kl_rest", "KL from token 2", "nats", "mean of it over an answer's tokens but the first", True),
        Metric("kl_first", "KL, token 1", "nats", "of it, before the first token"),
        Metric("top1_rest", "same likeliest, from token 2", "part", "tokens, but the first, likeliest in both", True),
        Metric("exact", "whole answer greedy", "share", "each token of the baseline's answer is the likeliest", True),
        *KEPT,
    )
    headlines = ("kl_rest",)
    blind = (
        "Only how far a method is from the baseline, not whether it is worse: the baseline may be wrong. The method "
        "never leaves the baseline's words, so what its own would have led to is not seen. Items whose answer ends "
        "early are missing from later positions."
    )

    def measure(
        self, comparison: Comparison, cases: Sequence[Case], known: Sequence[RecordsByMeasure]
    ) -> list[dict[str, Record]]:
        baseline = comparison.baseline.method
        requests = comparison.run(
            [lambda case=case: baseline.program(case.prompt) for case in cases],
            [
                SamplingParams(max_tokens=comparison.positions, ignore_eos=comparison.params(case.item).ignore_eos)
                for case in cases
            ],
        )
        texts = [[token.id for token in request.events] for request in requests]

        def program(case: Case, text: list[int]) -> Program:
            expected = yield from force_text(baseline.program(case.prompt), text, comparison.baseline.name)
            records: dict[str, Record] = {}
            for contender in comparison.contenders:
                made = yield from force_text(contender.method.program(case.prompt), text, contender.name)
                _, kl, same = compare(expected.logits, made.logits, text).tolist()
                records[contender.name] = {
                    "kl": kl,
                    "kl_first": kl[0],
                    "kl_rest": sum(kl[1:]) / len(kl[1:]) if kl[1:] else None,
                    "top1_rest": sum(same[1:]) / len(same[1:]) if same[1:] else None,
                    "exact": all(same),
                    "kept_bytes": made.kv_bytes,
                }
            return records

        programs = [lambda case=case, text=text: program(case, text) for case, text in zip(cases, texts, strict=True)]
        return [request.result for request in comparison.run(programs)]
