"""Retrieval at length, after Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language
Models?" (arXiv:2404.06654), section 3 and appendix B: its thirteen kinds, generated.

In its two kinds with questions of SQuAD and HotpotQA, questions over Wikipedia are made by rule (`facts.py`). Filler is
English Wikipedia where the paper has essays, and words are common ones of it. Sentences are our own.
"""

import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from twostroke.fields import integer, text
from twostroke.study.evaluate.task import Item, Task, random_stream
from twostroke.study.evaluate.tasks.facts import one_hop, two_hops
from twostroke.study.evaluate.wikipedia import SOURCE, articles

if TYPE_CHECKING:
    from twostroke.models.checkpoints.tokenizer import Tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4  # assignments of a variable to the next
COMMON, OFTEN, SELDOM = 10, 30, 3  # common words, how often each is listed, and how often each of the others
RARE_EXPONENT = 2.0  # of the zeta distribution of coded words
_SENTENCE = re.compile(r"[A-Z][^.!?\n]{20,}[.!?](?=\s|$)")

Parts = tuple[list[str], list[str], str, list[str]]  # needles, filler to draw from in order, question, answers
Kind = Callable[[random.Random], Parts]


@dataclass(frozen=True)
class Ruler(Task):
    """Needles, several keys, values and queries, variables, common and frequent words, questions over documents.

    An answer is right if it has all that was asked for, where the paper counts the share.
    """

    name = "ruler"
    max_tokens = 96
    about = f"generated; filler and words: {SOURCE.description} ({SOURCE.licence}), from the package gensim"

    kind: str = text("all", choices=("all", *(
        "niah-single-1", "niah-single-2", "niah-single-3", "niah-multikey-1", "niah-multikey-2", "niah-multikey-3",
        "niah-multivalue", "niah-multiquery", "variables", "common-words", "frequent-words", "qa-1", "qa-2",
    )), help="One kind, or all in turn.")  # fmt: skip
    length: int = integer(2000, least=200, most=1_000_000, help="Tokens of a prompt, without the chat template.")

    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        kinds = list(KINDS) if self.kind == "all" else [self.kind]
        return [self._item(tokenizer, kinds[i % len(kinds)], seed, i) for i in range(limit)]

    def correct(self, item: Item, text: str) -> bool | None:
        found = text.lower()
        return all(re.search(rf"\b{re.escape(one.lower())}\b", found) for one in str(item.answers[0]).split(", "))

    def _item(self, tokenizer: "Tokenizer", kind: str, seed: int, index: int) -> Item:
        rng = random_stream(seed, self.name, kind, self.length, index)
        if kind in LISTS:
            context, question, answers = LISTS[kind](rng, lambda text: len(tokenizer.encode(text)) <= self.length)
        else:
            needles, filler, question, answers = (NEEDLES | QUESTIONS)[kind](rng)
            room = self.length - len(tokenizer.encode(" ".join([*needles, question])))
            joint = "\n\n" if kind in QUESTIONS else " "
            context = hidden(rng, needles, fill(tokenizer, filler, room, joint), joint)
        return Item(f"{self.name}-{kind}-{index}", f"{context}\n\n{question}", (", ".join(answers),))


def fill(tokenizer: "Tokenizer", filler: Sequence[str], room: int, joint: str = " ") -> list[str]:
    """As many sentences as have `room` tokens, from the first on; from the first again if they are too few."""
    kept: list[str] = []
    while room > 0:
        sentence = filler[len(kept) % len(filler)]
        room -= len(tokenizer.encode(joint + sentence, add_bos=False))
        kept.append(sentence)
    return kept[:-1]


def hidden(rng: random.Random, needles: Sequence[str], filler: list[str], joint: str = " ") -> str:
    """The filler with the needles in order, at places drawn evenly."""
    places = sorted(rng.randint(0, len(filler)) for _ in needles)
    for needle, place in reversed(list(zip(needles, places, strict=True))):
        filler.insert(place, needle)
    return joint.join(filler)


@cache
def sentences() -> list[str]:
    """Sentences of Wikipedia, article after article."""
    return [found.group() for article in articles() for found in _SENTENCE.finditer(article)]


@cache
def words() -> list[str]:
    """Different common words of Wikipedia, in order of the alphabet."""
    counts = Counter(word for one in sentences() for word in re.findall(r"\b[a-z]{4,9}\b", one))
    return sorted(word for word, count in counts.items() if count >= 5)


def essay(rng: random.Random) -> list[str]:
    """Sentences that follow one another, from one drawn."""
    every = sentences()
    start = rng.randrange(len(every))
    return every[start:] + every[:start]


def number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def code(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def drawn_words(rng: random.Random, count: int) -> list[str]:
    return rng.sample(words(), count)


def niah(
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    filler: str = "essay",
    key: Callable[[random.Random], str] | None = None,
    value: Callable[[random.Random], str] = number,
) -> Kind:
    """Needles in a haystack: numbers or codes of keys, of which some are asked for.

    `filler`: "noise", "essay", or "needles" of other keys. `key`: None draws words.
    """

    def needle(of: str, is_: str) -> str:
        return f"The secret value of {of} is {is_}."

    def made(rng: random.Random) -> Parts:
        names = [key(rng) for _ in range(keys)] if key else drawn_words(rng, keys)
        held = {name: [value(rng) for _ in range(values)] for name in names}
        needles = [needle(name, one) for name, own in held.items() for one in own]
        rng.shuffle(needles)
        asked = rng.sample(names, queries)
        around = [NOISE] if filler == "noise" else essay(rng) if filler == "essay" else []
        if filler == "needles":
            others = [key(rng) for _ in range(2000)] if key else drawn_words(rng, min(2000, len(words())))
            around = [needle(other, value(rng)) for other in others if other not in held]
        many = values > 1 or queries > 1
        question = (
            f"What {'are all the secret values' if many else 'is the secret value'} of {', '.join(asked)} in the text "
            f"above? Answer with the value{'s' if many else ''} alone."
        )
        return needles, around, question, [one for name in asked for one in held[name]]

    return made


def variables(rng: random.Random) -> Parts:
    """Which variables have a value, by a chain of assignments?"""
    names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(HOPS + 1)]
    value = rng.randrange(10_000, 100_000)
    needles = [f"VAR {names[0]} = {value}."]
    needles += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    question = f"Which variables have the value {value} in the text above? Answer with their {len(names)} names alone."
    return needles, [NOISE], question, names


def common_words(rng: random.Random, fits: Callable[[str], bool]) -> tuple[str, str, list[str]]:
    """Which words of a list are there most often? As many seldom words as there is room for."""
    question = f"Which {COMMON} words are in the list above most often? Answer with the words alone."
    pool = drawn_words(rng, min(len(words()), 20_000))
    common, others = pool[:COMMON], pool[COMMON:]

    def listed(count: int) -> str:
        often = min(OFTEN, max(SELDOM + 2, count))  # short lists have fewer of each
        every = common * often + others[:count] * SELDOM
        random_stream(0, *common, count).shuffle(every)
        return " ".join(f"{i}. {word}" for i, word in enumerate(every, 1))

    return largest(listed, len(others), lambda text: fits(f"{text}\n\n{question}")), question, common


def frequent_words(rng: random.Random, fits: Callable[[str], bool]) -> tuple[str, str, list[str]]:
    """Which coded words occur most often, where the frequency of the i-th falls as 1 / i ** 2?"""
    question = "Which three coded words are in the text above most often? Answer with the three words alone."
    coded = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(50)]

    def listed(count: int) -> str:
        every = [word for i, word in enumerate(coded, 1) for _ in range(int(count * i**-RARE_EXPONENT))]
        random_stream(0, *coded, count).shuffle(every)
        return " ".join(every)

    return largest(listed, 1_000_000, lambda text: fits(f"{text}\n\n{question}"), least=20), question, coded[:3]


def largest(made: Callable[[int], str], most: int, fits: Callable[[str], bool], least: int = 1) -> str:
    """The text of the largest number that fits, or that of the least."""
    low = least
    while low < most and fits(made(min(most, 2 * low))):
        low = min(most, 2 * low)
    high = min(most, 2 * low)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(made(middle)) else (low, middle - 1)
    return made(low)


NEEDLES: dict[str, Kind] = {
    "niah-single-1": niah(filler="noise"),
    "niah-single-2": niah(),
    "niah-single-3": niah(value=code),
    "niah-multikey-1": niah(keys=4),
    "niah-multikey-2": niah(filler="needles"),
    "niah-multikey-3": niah(filler="needles", key=code, value=code),
    "niah-multivalue": niah(values=4),
    "niah-multiquery": niah(keys=4, queries=4),
    "variables": variables,
}
LISTS = {"common-words": common_words, "frequent-words": frequent_words}
QUESTIONS: dict[str, Kind] = {"qa-1": one_hop, "qa-2": two_hops}
KINDS = (*NEEDLES, *LISTS, *QUESTIONS)
