"""Questions over paragraphs of Wikipedia, made by rule: no person wrote or checked them.

A fact is a sentence with a year that its paragraph names once, "In YEAR, ..." or "... in YEAR.": quoted without the
year, it asks for it (one hop, in the place of SQuAD). Another paragraph that names the same year is the second hop: its
subject is asked for, and no other paragraph beside names that year (a bridge, in the place of HotpotQA). The quote is
literal, so the first hop is easier to find than in questions that people wrote.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

from twostroke.study.evaluate.wikipedia import titled

MAX_LETTERS = 900  # letters of a paragraph
_YEAR = r"(?P<year>1\d{3}|20[01]\d)"
_FACTS = tuple(
    re.compile(rf"(?:^|(?<=[.!?] )){pattern}\.(?=\s|$)")
    for pattern in (rf"In {_YEAR}, (?P<said>[^.!?\n]{{40,200}})", rf"(?P<said>[A-Z][^.!?\n]{{40,200}}),? in {_YEAR}")
)


@dataclass(frozen=True)
class Passage:
    title: str
    text: str

    @property
    def shown(self) -> str:
        return f"Document: {self.title}\n{self.text}"

    @property
    def years(self) -> set[str]:
        return set(re.findall(rf"\b{_YEAR}\b", self.text))


@dataclass(frozen=True)
class Fact:
    """`said` of `year`, in a passage."""

    passage: Passage
    year: str
    said: str

    @property
    def question(self) -> str:
        title = self.passage.title
        return f'On {title}, the text above says: "{self.said}". In which year was that? Answer with the year alone.'


@cache
def passages() -> list[Passage]:
    """All paragraphs, article after article, that are not too long."""
    return [
        Passage(re.sub(r" \(.*\)$", "", title), text)
        for title, every in titled()
        for text in every
        if len(text) <= MAX_LETTERS
    ]


@cache
def facts() -> list[Fact]:
    """All facts, in order."""
    found: list[Fact] = []
    for passage in passages():
        for match in (match for pattern in _FACTS for match in pattern.finditer(passage.text)):
            year, said = match["year"], match["said"]
            if passage.text.count(year) == 1 and not re.search(r"\d{4}", said):
                found.append(Fact(passage, year, said))
    return found


def shuffled(rng: random.Random) -> list[Passage]:
    return rng.sample(passages(), len(passages()))


def one_hop(rng: random.Random) -> tuple[list[str], list[str], str, list[str]]:
    """Needles, filler, question and answers, as `ruler` has them."""
    fact = rng.choice(facts())
    around = [one.shown for one in shuffled(rng) if fact.said not in one.text]
    return [fact.passage.shown], around, fact.question, [fact.year]


def two_hops(rng: random.Random) -> tuple[list[str], list[str], str, list[str]]:
    """The same, where the year leads to another document's subject."""
    while True:
        fact, every = rng.choice(facts()), shuffled(rng)
        title = fact.passage.title
        same = [one for one in every if fact.year in one.years and not alike(one.title, title)]
        if same:
            break
    found = same[0]
    around = [one for one in every if fact.year not in one.text and not alike(one.title, found.title)]
    question = (
        f'The document on {title} says of a certain year: "{fact.said}". Which other subject has a document above that '
        f"names the same year? Answer with that subject alone."
    )
    needles = [fact.passage.shown, found.shown]
    return rng.sample(needles, 2), [one.shown for one in around], question, [found.title]


def alike(one: str, other: str) -> bool:
    """Whether a title is part of the other, or too short to be told from words of an answer."""
    return min(len(one), len(other)) < 4 or one in other or other in one
