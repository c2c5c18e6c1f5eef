"""Questions that open a long answer, in the place of ELI5 (Fan et al. 2019): why and how, on everyday things."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.evals.task import Item, Task, lines, stream


@dataclass(frozen=True)
class LongForm(Task):
    """No answer is right or wrong: what is measured is how far an answer strays, and from what."""

    name = "longform"
    measures = ("answers", "judge", "divergence")
    max_tokens = 256
    about = "questions written for this project"

    def items(self, tokenizer: Tokenizer, limit: int, seed: int) -> list[Item]:
        questions = [Item(f"longform-{i}", text) for i, text in enumerate(lines("questions.txt"))]
        stream(seed, self.name).shuffle(questions)
        return questions[:limit]
