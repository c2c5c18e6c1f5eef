"""Likelihood of given answers after what a method keeps: what it knows, however it would word it."""

from collections.abc import Generator, Sequence
from typing import Any

from twostroke.engine.strokes import Program
from twostroke.study.evaluate.contenders import Contender
from twostroke.study.evaluate.forced_text import force_text
from twostroke.study.evaluate.measure import KEPT, Case, Comparison, Measure, Metric, Record, RecordsByMeasure
from twostroke.study.evaluate.task import Task


class Likelihood(Measure):
    """Every answer of an item is entered, teacher-forced, after what each method keeps of the prompt."""

    name = "likelihood"
    metrics = (
        Metric("chosen", "right one likeliest", "share", "of several, the right answer has most log-p per byte", True),
        Metric("greedy", "exact, teacher-forced", "share", "every token of the right answer is the likeliest", True),
        Metric("rest_greedy", "exact from token 2", "share", "every token but the first is the likeliest", True),
        Metric("surprise", "surprise per token", "nats", "mean of -log p over the right answer's tokens", True),
        Metric("first_surprise", "surprise, token 1", "nats", "-log p of the right answer's first token", True),
        Metric("rest_surprise", "surprise, from token 2", "nats", "mean of -log p over its other tokens", True),
        Metric("perplexity", "perplexity", "perplexity", "e to the surprise per token", exponent_of="surprise"),
        *KEPT,
    )
    headlines = ("chosen", "perplexity")
    blind = (
        "The right answer is given word for word: a model that would put it otherwise is marked down, and one that "
        "would never have begun it is led past its mistake. The first token is the whole prefill's, whatever is kept."
    )

    def suits(self, task: Task, cases: Sequence[Case]) -> str | None:
        return None if all(case.answers for case in cases) else f"the items of {task.name} come without answers"

    def measure(
        self, comparison: Comparison, cases: Sequence[Case], known: Sequence[RecordsByMeasure]
    ) -> list[dict[str, Record]]:
        def program(case: Case) -> Program:
            records: dict[str, Record] = {}
            for contender in comparison.contenders:
                records[contender.name] = yield from _score(contender, case)
            return records

        return [request.result for request in comparison.run([lambda case=case: program(case) for case in cases])]


def _score(contender: Contender, case: Case) -> Generator[Any, Any, Record]:
    per_byte: list[float] = []
    gold: Record = {}
    for index, (tokens, text) in enumerate(zip(case.answers, case.item.answers, strict=True)):
        made = yield from force_text(contender.method.program(case.prompt), tokens, contender.name)
        logprobs = made.logprobs(tokens)
        likeliest = [int(best) == token for best, token in zip(made.logits.argmax(-1), tokens, strict=True)]
        per_byte.append(sum(logprobs) / len(text.encode() if isinstance(text, str) else text))
        if index == case.item.gold:
            rest = logprobs[1:]
            gold = {
                "logprobs": logprobs,
                "greedy": all(likeliest),
                "rest_greedy": all(likeliest[1:]) if rest else None,
                "surprise": -sum(logprobs) / len(logprobs),
                "first_surprise": -logprobs[0],
                "rest_surprise": -sum(rest) / len(rest) if rest else None,
                "kept_bytes": made.kv_bytes,
            }
    several = len(per_byte) > 1
    chosen = max(range(len(per_byte)), key=per_byte.__getitem__) == case.item.gold if several else None
    return gold | {"chosen": chosen, "per_byte": per_byte}
