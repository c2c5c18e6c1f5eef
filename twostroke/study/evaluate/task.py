"""Tasks of an evaluation: their items, and the grading of answers."""

import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar

from twostroke.fields import Checked

if TYPE_CHECKING:
    from twostroke.models.checkpoints.tokenizer import Tokenizer


@dataclass(frozen=True)
class Item:
    """One question, the same for every method."""

    id: str  # unique within the task, and the same in every run
    prompt: str | tuple[int, ...]  # the user's words, or token ids that are taken as they are
    # texts (or token ids) whose likelihood can be measured; choices, if there are several
    answers: tuple[str | tuple[int, ...], ...] = ()
    gold: int = 0  # which of them is right


@dataclass(frozen=True)
class Task(Checked, ABC):
    """A source of items. Subclasses are frozen dataclasses; fields are parameters, declared as in `fields.py`."""

    name: ClassVar[str]
    measures: ClassVar[tuple[str, ...]] = ("answers", "likelihood")  # names of the measures taken by default
    max_tokens: ClassVar[int] = 24  # of a generated answer
    about: ClassVar[str]  # one line on where its items come from, and under which licence

    @abstractmethod
    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        """The first `limit` items of this seed: a larger limit begins with the same ones. Fewer if there are no more.

        Raises FetchError if the task's data cannot be had.
        """

    def correct(self, item: Item, text: str) -> bool | None:
        """Whether a generated text answers the item; None if this task does not grade texts."""
        return None

    @property
    def checked_as(self) -> str:
        return f"{self.name}: "

    @property
    def parameters(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def random_stream(seed: int, *path: object) -> random.Random:
    """A random stream for each path (such as a task and an item), so that an item does not depend on their number."""
    return random.Random("/".join(str(part) for part in (seed, *path)))


def data_text(name: str) -> str:
    """A text file of this package's data."""
    return (files("twostroke.study.evaluate") / "data" / name).read_text(encoding="utf-8")


def lines(name: str) -> list[str]:
    """The lines of a file of this package's data, without blank ones."""
    return [line for line in data_text(name).splitlines() if line.strip()]


def encode_prompt(tokenizer: "Tokenizer", item: Item, chat: bool) -> list[int]:
    """Through the chat template, or as plain text that ends with "Answer:"."""
    if not isinstance(item.prompt, str):
        return list(item.prompt)
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": item.prompt}])
    return tokenizer.encode(f"{item.prompt}\n\nAnswer:")


def encode_answer(tokenizer: "Tokenizer", answer: str | Sequence[int], chat: bool) -> list[int]:
    """Encode an answer as it would follow the prompt: at the start of a turn, or after "Answer:" and a space."""
    if not isinstance(answer, str):
        return list(answer)
    return tokenizer.encode(answer if chat else f" {answer}", add_bos=False, parse_special=False)
