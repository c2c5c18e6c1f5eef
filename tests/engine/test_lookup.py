"""Lookups know how their guesses fare, without trying any; lanes that guess say the same as lanes that do not."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.acceptance import AcceptanceByKind
from twostroke.engine.lookup import LookupGuesses
from twostroke.engine.strokes import Lookup
from twostroke.engine.text_history import NGRAM, TextHistory


def lookup(prompt: list[int], history: TextHistory | None = None) -> LookupGuesses:
    made = LookupGuesses(Lookup(), (history or TextHistory()).begin(b""), AcceptanceByKind())
    made.begin(prompt)
    return made


def test_what_followed_before_is_guessed() -> None:
    found = lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert found.guesses(2) == [4, 5]
    found.add(4)
    assert found.guesses(9) == [5, 6, 9, 1, 2, 3, 4]
    found.add(7)
    assert not found.found
    assert not found.guesses(3)
    assert not found.chances(3)


def test_chances_shrink_and_follow_what_came() -> None:
    found = lookup([*range(100), 0, 1, 2])
    before = found.chances(16)
    assert before == sorted(before, reverse=True)
    for token in range(3, 60):
        assert found.guesses(1) == [token]
        found.add(token)
    sure = found.chances(16)
    assert sure[-1] > 0.5 > before[-1]
    wrong = lookup([*range(100), 0, 1, 2])
    for start in range(0, 90, 3):  # each match fails at its first token
        for token in (200 + start, start, start + 1, start + 2):
            wrong.add(token)
    assert wrong.found
    assert wrong.chances(16)[:1] < [0.3]


def test_other_texts_are_of_another_kind_than_its_own() -> None:
    """What is learned of texts that were answered before says nothing of a text that repeats itself."""
    history = TextHistory()
    other = lookup([*range(100)], history)
    answer = lookup([0, 1, 2], history)
    for token in range(3, 100):  # stands in the other text, always
        assert answer.guesses(1) == [token]
        answer.add(token)
    assert answer.chances(1) == []
    assert other.chances(1) == []
    sure, unknown = 0.9, AcceptanceByKind().rate(None)
    of_salt = AcceptanceByKind()
    for prompt, first in (([*range(9), 0, 1, 2], unknown), ([10, 11, 12], unknown)):  # of its own text; of the other
        found = LookupGuesses(Lookup(), history.begin(b""), of_salt)
        found.begin(prompt)
        assert found.chances(1) == [first]
    for token in range(13, 60):
        found.add(token)
    assert found.chances(1)[0] > sure
    own = LookupGuesses(Lookup(), history.begin(b"salt"), of_salt)
    own.begin([*range(100), 10, 11, 12])
    assert own.chances(1) == [unknown]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_a_place_is_one_where_the_same_stood_before(prompt: list[int], answer: list[int]) -> None:
    found, text = lookup(prompt), [*prompt]
    for token in answer:
        found.add(token)
        text.append(token)
        guesses = list(found.guesses(5))
        places = [i for i in range(NGRAM, len(text)) if text[i - NGRAM : i] == text[-NGRAM:]]
        assert found.found == bool(places)
        assert not places or any(text[i : i + 5] == guesses for i in places)
