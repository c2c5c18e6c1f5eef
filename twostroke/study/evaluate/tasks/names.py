"""Finding a name in a list, after Leviathan et al. 2025, "Prompt Repetition Improves Non-Reasoning LLMs".

The question comes after the list, so a model that reads once has read every name before it knows the question.
"""

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.fields import integer
from twostroke.study.evaluate.task import Item, Task, lines, random_stream

if TYPE_CHECKING:
    from twostroke.models.checkpoints.tokenizer import Tokenizer

CENSUS = "generated; the most frequent names of the US census of 1990 (public domain)"


class _ListTask(Task):
    """Answers are names of a list; an answer is right if it has that name and no other of the list."""

    about = CENSUS

    def correct(self, item: Item, text: str) -> bool | None:
        found = {name for name in names_of(item) if re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE)}
        return found == {item.answers[item.gold]}


@dataclass(frozen=True)
class NameIndex(_ListTask):
    """What is the k-th name of a list of different names? (k drawn evenly)

    FARS 2026 (PTDO) has 256 names, about 1,500 tokens.
    """

    name = "nameindex"

    names: int = integer(50, least=1, most=10_000, help="How many the list has.")

    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        return [self._item(random_stream(seed, self.name, self.names, i), i) for i in range(limit)]

    def _item(self, rng: random.Random, index: int) -> Item:
        names = draw_names(rng, self.names)
        place = rng.randrange(self.names)
        prompt = f"{listed(names)}\nWhat is the {ordinal(place + 1)} name in the list? Answer with the name alone."
        return Item(f"{self.name}-{index}", prompt, (names[place],))


@dataclass(frozen=True)
class MiddleMatch(_ListTask):
    """Which name stands directly between two given ones? Names recur; the pair asked for occurs once, in this order."""

    name = "middlematch"

    names: int = integer(40, least=3, most=10_000, help="How many the list has.")
    different: int = integer(10, least=3, help="How many different names it draws from.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("different", self.different <= self.names, f"at most names, {self.names}")

    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        return [self._item(random_stream(seed, self.name, self.names, self.different, i), i) for i in range(limit)]

    def _item(self, rng: random.Random, index: int) -> Item:
        pool = draw_names(rng, self.different)
        while True:  # a long list of few different names may have no pair that occurs once
            names = [rng.choice(pool) for _ in range(self.names)]
            around = [(names[i - 1], names[i + 1]) for i in range(1, self.names - 1)]
            once = [i for i, pair in enumerate(around, 1) if around.count(pair) == 1 and names[i] not in pair]
            if once:
                break
            pool = draw_names(rng, min(len(pool) + 1, self.names))
        place = rng.choice(once)
        before, after = names[place - 1], names[place + 1]
        prompt = (
            f"{listed(names)}\nWhich name in the list comes directly after {before} and directly before {after}? "
            f"Answer with the name alone."
        )
        return Item(f"{self.name}-{index}", prompt, (names[place],))


def draw_names(rng: random.Random, count: int) -> list[str]:
    """`count` different full names."""
    first, last = lines("first_names.txt"), lines("last_names.txt")
    chosen = rng.sample(range(len(first) * len(last)), count)
    return [f"{first[i // len(last)]} {last[i % len(last)]}" for i in chosen]


def listed(names: list[str]) -> str:
    return f"Here is a list of names:\n{', '.join(names)}"


def names_of(item: Item) -> list[str]:
    """The list that an item's prompt shows."""
    assert isinstance(item.prompt, str)
    return item.prompt.splitlines()[1].split(", ")


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
