"""Questions that open a long answer, in the place of ELI5 (Fan et al. 2019): why and how, on everyday things."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.study.evaluate.task import Item, Task, lines, random_stream

if TYPE_CHECKING:
    from twostroke.models.checkpoints.tokenizer import Tokenizer


@dataclass(frozen=True)
class LongForm(Task):
    """Why and how questions with long answers. None is right or wrong: divergence, repetition and a judge say more."""

    name = "longform"
    measures = ("answers", "judge", "divergence")
    max_tokens = 256
    about = "questions written for this project"

    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        questions = [Item(f"longform-{i}", text) for i, text in enumerate(lines("questions.txt"))]
        random_stream(seed, self.name).shuffle(questions)
        return questions[:limit]
