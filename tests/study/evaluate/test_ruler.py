"""RULER's kinds: the answer is in the prompt, which has the length asked for, and grading wants all of it."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.study.evaluate.task import Item
from twostroke.study.evaluate.tasks import LongBench, Ruler, facts, longbench, ruler

LENGTH = 3000  # tokens of the tiny model, a few letters each
WORDS = [a + b + c for a in ("bel", "cor", "dan", "fil", "gra") for b in "aeiou" for c in ("ka", "mi", "nu", "so")]


@pytest.fixture
def tokenizer(tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Beside an encyclopedia of made-up words, which is not fetched; two articles in turn name a year together."""
    article = " ".join(f"There the {one} and the {other} were often seen." for one, other in zip(WORDS, WORDS[5:]))  # noqa: B905
    monkeypatch.setattr(ruler, "articles", lambda: iter([article] * 6))
    subjects = ("Belka", "Cormi", "Dannu", "Filso", "Grake", "Hormi")
    entries = [
        (subject, [f"In {1700 + (n + i // 2) % 200}, the {WORDS[n % 75]} and the {subject} of {WORDS[n % 99]} were "
                   f"first seen in {WORDS[n * 7 % 100]} beside it." for n in range(60)])
        for i, subject in enumerate(subjects)
    ]  # fmt: skip
    monkeypatch.setattr(facts, "titled", lambda: iter(entries))
    kept = (ruler.sentences, ruler.words, facts.passages, facts.facts, longbench.frequencies)
    for made in kept:
        made.cache_clear()
    yield tiny_llm().tokenizer
    for made in kept:
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
        assert not task.correct(item, "")
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


def test_a_fact_is_told_once_and_its_year_leads_to_one_other_document(tokenizer: Any) -> None:
    for item in Ruler("qa-1", LENGTH).items(tokenizer, 6, seed=1):
        context, question, (year,) = parts(item)
        title, said = re.findall(r'On (\w+), the text above says: "(.*)"', question)[0]
        found = [one for one in context.split("\n\n") if said in one]
        assert len(found) == 1
        assert found[0].startswith(f"Document: {title}\nIn {year}, ")
        assert year not in question
    for item in Ruler("qa-2", LENGTH).items(tokenizer, 6, seed=1):
        context, question, (subject,) = parts(item)
        title, said = re.findall(r'The document on (\w+) says of a certain year: "(.*)"', question)[0]
        documents = context.split("\n\n")
        (told,) = (one for one in documents if said in one)
        year = re.findall(r"In (\d+),", told)[0]
        named = {one for one in documents if year in one}
        assert sorted(one.split("\n")[0] for one in named) == sorted(f"Document: {one}" for one in (title, subject))


@pytest.mark.parametrize("kind", longbench.KINDS)
def test_questions_over_long_texts(kind: str, tokenizer: Any) -> None:
    task = LongBench(kind, LENGTH)
    items = task.items(tokenizer, 5, seed=1)
    assert task.items(tokenizer, 2, seed=1) == items[:2]
    for item in items:
        context, question, (answer,) = parts(item)
        assert 0.85 * LENGTH < len(tokenizer.encode(str(item.prompt))) <= LENGTH + 8
        assert task.correct(item, f"It is {answer}.")
        assert not task.correct(item, f"9{answer}, or {answer}" if answer.isdigit() else f"{answer}s")
        listed = dict(re.findall(r"Paragraph (\d+): (.*)", context))
        match kind:
            case "document":
                assert len([one for one in context.split("\n") if re.search(rf"In {answer}, ", one)]) >= 1
            case "retrieval":
                keys = question.partition(": ")[2].partition("?")[0].split(", ")
                found = [at for at, one in listed.items() if {*keys} <= {*re.findall(r"[a-z]+", one)}]
                assert found == [answer]
            case "count":
                assert len(set(listed.values())) == int(answer) <= len(listed)
            case _:
                assert answer in question.rpartition("one of ")[2]
                assert question.splitlines()[0] not in context


def test_all_kinds_come_in_turn(tokenizer: Any) -> None:
    items = Ruler(length=1000).items(tokenizer, 26, seed=1)
    kinds = [re.sub(r"^ruler-|-\d+$", "", item.id) for item in items]
    assert kinds == [*ruler.KINDS, *ruler.KINDS]
    assert len({item.id for item in items}) == 26


def test_bad_parameters_are_one_line() -> None:
    with pytest.raises(InvalidRequest, match="ruler: kind"):
        Ruler("needle")
    with pytest.raises(InvalidRequest, match="ruler: length"):
        Ruler(length=10)
