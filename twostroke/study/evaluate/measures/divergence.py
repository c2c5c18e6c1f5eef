"""Distance to the baseline at every position of the baseline's own answer: what single tokens cannot show.

FARS 2026 (PTDO) judges by answers of a token or two, of which the first is full repetition's by construction. Here
every method is led through full repetition's answer, and its distribution compared before each of its tokens.
"""

from collections.abc import Sequence

from twostroke.engine.strokes import Program
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.forced_text import force_text
from twostroke.study.evaluate.logit_distance import compare
from twostroke.study.evaluate.measure import KEPT, Case, Comparison, Measure, Metric, Record, RecordsByMeasure


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
