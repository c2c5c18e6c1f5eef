"""Long answers without a right one: read again by the plain model, and searched for repetition.

The measures of Emara et al., "KV-Cache Refresh Methods for Long Generation": teacher perplexity, the log-probability
of the last tokens, repetition@3. The judge is the engine's own model (the teacher) over the plain prompt.
"""

from collections.abc import Generator, Sequence
from typing import Any

from twostroke.engine.strokes import Prefill, Prefilled, Program
from twostroke.study.evaluate.measure import Case, Comparison, Measure, Metric, Record, RecordsByMeasure

TAIL = 50


class Judge(Measure):
    """Scores the generated answers of every method with one and the same model."""

    name = "judge"
    needs = ("answers",)
    metrics = (
        Metric(
            "judge_perplexity",
            "teacher perplexity",
            "perplexity",
            "e to the mean over answers of -log p per token, engine's own model",
            exponent_of="judge_surprise",
        ),
        Metric("judge_surprise", "teacher's surprise per token", "nats", "mean -log p of the answer's tokens", True),
        Metric(
            "judge_tail", "tail log-probability", "nats", f"mean log p of the answer's last {TAIL} tokens", pairs=True
        ),
        Metric(
            "repetition3",
            "repetition@3",
            "part",
            "three tokens in a row that occurred before in the answer",
            pairs=True,
        ),
    )
    headlines = ("judge_perplexity", "judge_tail", "repetition3")
    blind = (
        "Low surprise does not prove a good answer: a dull text has little of it, and a loop has the least. "
        "Read it together with repetition@3 and the length."
    )

    def measure(
        self, comparison: Comparison, cases: Sequence[Case], known: Sequence[RecordsByMeasure]
    ) -> list[dict[str, Record]]:
        def program(case: Case, answers: dict[str, Record]) -> Program:
            records: dict[str, Record] = {}
            for contender in comparison.contenders:
                tokens = answers[contender.name]["token_ids"]
                logprobs = yield from judged(case.prompt, tokens)
                last = logprobs[-TAIL:]
                records[contender.name] = {
                    "judge_surprise": -sum(logprobs) / len(logprobs),
                    "judge_tail": sum(last) / len(last),
                    "repetition3": repetition(tokens),
                    "logprobs": [round(logprob, 4) for logprob in logprobs],
                }
            return records

        programs = [
            lambda case=case, made=made: program(case, made["answers"]) for case, made in zip(cases, known, strict=True)
        ]
        return [request.result for request in comparison.run(programs)]


def judged(prompt: Sequence[int], tokens: Sequence[int]) -> Generator[Any, Any, list[float]]:
    """log p of each token after the prompt, by the engine's own model."""
    scored: Prefilled = yield Prefill([*prompt, *tokens], logprobs=0, scored_from=len(prompt))
    return [score.logprob for score in scored.scores if score is not None]


def repetition(tokens: Sequence[int], size: int = 3) -> float | None:
    """The share of runs of `size` tokens that occurred before; None where there is no such run."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else None
