"""RULER's kinds: the answer is in the prompt, which has the length asked for, and grading wants all of it."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.study.evaluate.task import Item
from twostroke.study.evaluate.tasks import Ruler, ruler

LENGTH = 3000  # tokens of the tiny model, a few letters each
WORDS = [a + b + c for a in ("bel", "cor", "dan", "fil", "gra") for b in "aeiou" for c in ("ka", "mi", "nu", "so")]


@pytest.fixture
def tokenizer(tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Beside an encyclopedia of made-up words, which is not fetched."""
    article = " ".join(f"There the {one} and the {other} were often seen." for one, other in zip(WORDS, WORDS[5:]))  # noqa: B905
    monkeypatch.setattr(ruler, "articles", lambda: iter([article] * 6))
    for made in (ruler.sentences, ruler.words):
        made.cache_clear()
    yield tiny_llm().tokenizer
    for made in (ruler.sentences, ruler.words):
        made.cache_clear()


def parts(item: Item) -> tuple[str, str, list[str]]:
    context, _, question = str(item.prompt).rpartition("\n\n")
    return context, question, str(item.answers[0]).split(", ")


@pytest.mark.parametrize("kind", ruler.KINDS)
def test_the_answer_is_there_and_the_prompt_as_long_as_asked_for(kind: str, tokenizer: Any) -> None:
    task = Ruler(kind, LENGTH)
    items = task.items(tokenizer, 6, seed=1)
    for item in items:
        context, _, answers = parts(item)
        assert all(one in context for one in answers)
        assert 0.85 * LENGTH < len(tokenizer.encode(str(item.prompt))) <= LENGTH + 8
        assert task.correct(item, f"They are {' and '.join(answers).upper()}.")
        assert not task.correct(item, f"They are {' and '.join(answers[1:])}.")
        assert not task.correct(item, " ".join(f"{one}x" for one in answers))
    assert task.items(tokenizer, 3, seed=1) == items[:3]
    assert task.items(tokenizer, 3, seed=2) != items[:3]


@pytest.mark.parametrize("kind", [kind for kind in ruler.KINDS if kind.startswith("niah")])
def test_needles_answer_the_question_and_no_other_does(kind: str, tokenizer: Any) -> None:
    for item in Ruler(kind, LENGTH).items(tokenizer, 6, seed=1):
        context, question, answers = parts(item)
        held = re.findall(r"The secret value of (\S+) is (\S+)\.", context)
        asked = question.partition(" of ")[2].partition(" in the text")[0].split(", ")
        assert sorted(value for name, value in held if name in asked) == sorted(answers)
        counts = {"niah-multivalue": 4, "niah-multiquery": 4}
        assert len(answers) == counts.get(kind, 1)
        others = len(held) - len(answers)
        assert others == 0 if "multikey" not in kind and "query" not in kind else others >= 0
        if "multikey-1" in kind:
            assert others == 3
        if kind in ("niah-multikey-2", "niah-multikey-3"):
            assert others > 10


def test_variables_are_a_chain(tokenizer: Any) -> None:
    for item in Ruler("variables", LENGTH).items(tokenizer, 6, seed=1):
        context, question, names = parts(item)
        value = re.findall(r"the value (\d+)", question)[0]
        known = set(re.findall(rf"VAR (\w+) = {value}\.", context))
        for new, old in re.findall(r"VAR (\w+) = VAR (\w+)\.", context):
            known |= {new} if old in known else set()
        assert known == set(names)
        assert len(names) == 5


def test_the_most_frequent_words_are_the_answer(tokenizer: Any) -> None:
    for kind, most in (("common-words", 10), ("frequent-words", 3)):
        for item in Ruler(kind, LENGTH).items(tokenizer, 4, seed=1):
            context, _, answers = parts(item)
            counts = Counter(re.findall(r"[a-z]+", context)).most_common(most + 1)
            assert {word for word, _ in counts[:most]} == set(answers)
            assert counts[most - 1][1] > counts[most][1]


def test_all_kinds_come_in_turn(tokenizer: Any) -> None:
    items = Ruler(length=1000).items(tokenizer, 22, seed=1)
    kinds = [re.sub(r"^ruler-|-\d+$", "", item.id) for item in items]
    assert kinds == [*ruler.KINDS, *ruler.KINDS]
    assert len({item.id for item in items}) == 22


def test_bad_parameters_are_one_line() -> None:
    with pytest.raises(InvalidRequest, match="ruler: kind"):
        Ruler("needle")
    with pytest.raises(InvalidRequest, match="ruler: length"):
        Ruler(length=10)
