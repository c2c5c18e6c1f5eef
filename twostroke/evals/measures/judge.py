"""Long answers without a right one: read again by the plain model, and searched for repetition.

The measures of Emara et al., "KV-Cache Refresh Methods for Long Generation": teacher perplexity, the log-probability
of the last tokens, repetition@3. The judge is the engine's default model (the teacher) over the plain prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.engine.sampling import SamplingParams
from twostroke.engine.strokes import Program
from twostroke.evals.forced import forced
from twostroke.evals.measure import Bench, Case, Known, Measure, Metric, Record
from twostroke.methods import Plain

TAIL = 50


class Judge(Measure):
    """Scores the generated answers of every method with one and the same model."""

    name = "judge"
    needs = ("answers",)
    metrics = (
        Metric("judge_surprise", "judge's surprise per token", "nats", "mean -log p of the answer, plain model", True),
        Metric("judge_perplexity", "judge's perplexity", "perplexity", "e to the first", exponent_of="judge_surprise"),
        Metric(
            "judge_tail", f"of the last {TAIL}", "nats", f"the same over the last {TAIL} tokens of the answer", True
        ),
        Metric("repetition3", "repetition@3", "part", "three tokens in a row that occurred before in the answer", True),
    )
    blind = (
        "A dull text surprises nobody: low surprise is no proof of a good answer, and a loop has the lowest. "
        "Read it together with repetition@3 and the length."
    )

    def measure(self, bench: Bench, cases: Sequence[Case], known: Sequence[Known]) -> list[dict[str, Record]]:
        def program(case: Case, answers: dict[str, Record]) -> Program:
            records: dict[str, Record] = {}
            for contender in bench.contenders:
                tokens = answers[contender.name]["token_ids"]
                judged = yield from forced(Plain().program(case.prompt), tokens)
                surprise = [-logprob for logprob in judged.logprobs(tokens)]
                last = surprise[-TAIL:]
                records[contender.name] = {
                    "judge_surprise": sum(surprise) / len(surprise),
                    "judge_tail": sum(last) / len(last),
                    "repetition3": repetition(tokens),
                }
            return records

        programs = [
            lambda case=case, made=made: program(case, made["answers"]) for case, made in zip(cases, known, strict=True)
        ]
        return [request.result for request in bench.run(programs, SamplingParams(max_tokens=None))]


def repetition(tokens: Sequence[int], size: int = 3) -> float | None:
    """The share of runs of `size` tokens that occurred before; None where there is no such run."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else None
