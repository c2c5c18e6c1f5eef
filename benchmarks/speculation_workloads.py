"""Workloads for speculation, from answers that repeat their prompt to random answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from twostroke.api.llm import LLM
from twostroke.study.bench.latency import BatchShape, PromptSource
from twostroke.study.evaluate.wikipedia import articles

RANDOM_TOKENS = 256  # length of a prompt of random tokens

PASSAGE = """\
The mill at Harrow stands where the river Tamble leaves the hills. It was built in 1784 by Jonas Keld, who had made his
money in wool and lost most of it again in a canal that never reached the sea. For eighty years it ground the wheat of
eleven villages; then the railway came, and flour from the coast was cheaper than flour from next door. Jonas Keld's
grandson sold the stones, kept the wheel, and rented the upper floor to a painter, who is said to have paid him in
pictures of the wheel. Two of them hang in the town hall. The third was found in 1951 behind a cupboard, and shows that
the wheel once had twelve spokes, and not ten, as Keld's drawings say."""

FUNCTIONS = '''\
def read_orders(path):
    """Orders by customer, from a file of comma-separated lines: customer, item, count, price."""
    orders = {}
    with open(path) as file:
        for number, line in enumerate(file, 1):
            fields = line.strip().split(",")
            if len(fields) != 4:
                raise ValueError(f"{path}, line {number}: 4 fields are wanted, not {len(fields)}")
            customer, item, count, price = fields
            orders.setdefault(customer, []).append((item, int(count), float(price)))
    return orders


def total(orders, customer):
    """What a customer has to pay."""
    return sum(count * price for _, count, price in orders.get(customer, []))
'''

CLASS = '''\
class Matrix:
    """A dense matrix of floats, stored row by row."""

    def __init__(self, rows, columns, values=None):
        self.rows, self.columns = rows, columns
        self.values = list(values) if values is not None else [0.0] * (rows * columns)

    def get(self, row, column):
        """The value in a row and a column."""
        return self.values[row * self.columns + column]

    def set(self, row, column, value):
        """Change the value in a row and a column."""
        self.values[row * self.columns + column] = value
'''

TESTS = """\
import unittest

from intervals import Interval


class TestInterval(unittest.TestCase):
    def test_length(self):
        self.assertEqual(Interval(2, 5).length, 3)

    def test_contains(self):
        self.assertTrue(Interval(2, 5).contains(3))
        self.assertFalse(Interval(2, 5).contains(6))
"""


@dataclass(frozen=True)
class Workload:
    """Some prompts of one kind. Without any, prompts are random tokens, and answers are sampled at temperature 1.

    A greedy answer to random tokens soon repeats itself, which is easy to guess.
    """

    name: str
    about: str
    questions: tuple[str, ...] = ()
    more: Callable[[int], str] | None = None  # a further question, by its number

    @property
    def temperature(self) -> float:
        return 0.0 if self.questions else 1.0

    def prompts(self, llm: LLM, count: int = 2) -> list[Sequence[int]]:
        """Token ids of unlike prompts: of a chat if the model has a template, else of the text."""
        if not self.questions:
            return [PromptSource().make(llm, BatchShape(RANDOM_TOKENS, 1), number)[0] for number in range(count)]
        assert self.more is not None
        questions = [*self.questions, *map(self.more, range(count - len(self.questions)))][:count]
        if llm.tokenizer.chat_template is None:
            return [llm.encode(question) for question in questions]
        return [llm.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]


@cache
def paragraphs() -> list[str]:
    """The first long paragraph of each article of Wikipedia's sample."""
    return [next(part for part in (*article.split("\n\n"), article) if len(part) > 500)[:900] for article in articles()]


WORKLOADS = (
    Workload(
        "copy",
        "a passage and a piece of code, written again with a name changed",
        (
            f"Write this text again word for word, but call the river Orme. Write nothing else.\n\n{PASSAGE}",
            f"Write this code again, but rename `orders` to `purchases`. Write only code.\n\n{FUNCTIONS}",
        ),
        lambda number: f"Write this text again word for word. Write nothing else.\n\n{paragraphs()[number]}",
    ),
    Workload(
        "code",
        "a class and a file of tests, continued",
        (
            f"Add methods `transpose`, `add`, `multiply` and `scale` to this class. Write only code.\n\n{CLASS}",
            f"Add tests of `overlaps`, `union`, `shift` and `split` to this file. Write only code.\n\n{TESTS}",
        ),
        lambda number: f"Add a method `power_{number}` to this class, with a loop. Write only code.\n\n{CLASS}",
    ),
    Workload(
        "open",
        "two questions with long answers",
        (
            "Why is the sea salty when the rivers that run into it are not? Explain in detail.",
            "How did people keep time before there were mechanical clocks? Explain in detail.",
        ),
        lambda number: (
            f"What is the most surprising claim here, and why? Explain in detail.\n\n{paragraphs()[number][:300]}"
        ),
    ),
    Workload("random", f"{RANDOM_TOKENS} random tokens, answered at temperature 1: the worst case"),
)
