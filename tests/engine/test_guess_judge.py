"""How many guesses pay: by what rows cost, by how many sequences wait for them, and by how guesses fared."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from twostroke.engine.choice_guesses import MAX_WAIT, Acceptance, ChoiceGuesses
from twostroke.engine.forecast import Forecast
from twostroke.engine.guess_judge import GuessJudge
from twostroke.engine.strokes import Guess, Guesses
from twostroke.models.cost import SequenceRows

MODEL: Any = "model"
DRAFT: Any = "draft"
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4]


class Rows(Forecast):
    """Steps of 10 ms, and some milliseconds for each row behind the first."""

    def __init__(self, row_ms: float) -> None:
        self.row_ms, self.asked = row_ms, 0

    def placed(self, entries: Any) -> float:
        return 0.01

    def observe(self, entries: Any, predicted: float, measured: float) -> None:
        pass

    def seconds(self, model: Any, step: Sequence[SequenceRows]) -> float:
        self.asked += 1
        if model == DRAFT:
            return 0.004
        return 0.01 + self.row_ms * (sum(one.count for one in step) - 1) / 1e3


class DearRows(Rows):
    """Each row costs as much as a step."""

    def __init__(self) -> None:
        super().__init__(10)


def judge(row_ms: float, sequences: int = 1) -> GuessJudge:
    return GuessJudge(lambda: Rows(row_ms), lambda: sequences)


def advised(of: GuessJudge, asks: Guess, choice: ChoiceGuesses | None = None, draft: Any = None) -> Guesses:
    return of.advise(asks, choice or of.begin(b""), MODEL, draft)


def test_free_rows_are_all_used_and_dear_ones_never() -> None:
    assert advised(judge(0), Guess(TEXT)).tokens == [5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4]
    assert advised(judge(0), Guess(TEXT, most=3)).tokens == [5, 6, 7]
    told = advised(judge(10), Guess(TEXT))
    assert (told.tokens, told.count) == ((), 0)
    assert advised(judge(10), Guess(TEXT, judged=False, most=5)).tokens == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("row_ms", [0.1, 1.0, 4.0])
def test_the_number_is_the_best_of_all(row_ms: float) -> None:
    """Against the definition: tokens over seconds, at the rate of what was never tried."""
    rate = Acceptance().rate()
    rate = Acceptance(0, 0).rate(rate)

    def speed(count: int) -> float:
        tokens = 1 + sum(rate**i for i in range(1, count + 1))
        return tokens / (0.01 + row_ms * count / 1e3 + (2e-4 if count else -0.0))

    best = max(range(1, 13), key=speed)
    expected = best if speed(best) > 1.02 * speed(0) else 0
    assert advised(judge(row_ms), Guess(TEXT)).count == expected


def test_the_more_sequences_wait_the_fewer_are_tried() -> None:
    counts = [advised(judge(0.5, sequences), Guess(TEXT)).count for sequences in (1, 2, 4, 8, 16, 32)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2
    assert counts[-1] == 0


def test_guesses_that_fail_become_rare_and_never_cease() -> None:
    of = judge(1)
    choice = of.begin(b"")
    told, rounds, decoded = advised(of, Guess(TEXT), choice), 0, 0
    for _ in range(60):
        rounds, decoded = rounds + bool(told.count), decoded + (told.count == 0) * choice.wait
        told = advised(of, Guess(TEXT, guessed=told.count, stood=0), choice)
        assert told.count <= 1 or rounds < 8
    assert told.count or choice.wait == MAX_WAIT
    assert rounds > 10
    for _ in range(10):
        told = advised(of, Guess(TEXT, guessed=4, stood=4), choice)
    assert told.count > 2, "it has learned that they are good again"


def test_a_draft_has_its_own_price() -> None:
    assert advised(judge(0.1), Guess(TEXT, "draft", most=8), draft=DRAFT).count in range(1, 8)
    told = advised(judge(3), Guess(TEXT, "draft", most=8), draft=DRAFT)
    assert (told.count, told.max_tokens) == (0, 1)


def test_when_to_ask_again() -> None:
    """Behind tokens that occurred before; not at once where guesses do not pay."""
    of = judge(10)
    choice = of.begin(b"")
    until = advised(of, Guess([1, 2, 3, 4, 5, 6, 7, 8]), choice).until
    assert until is not None

    def sampled(*ids: int) -> Any:
        return [cast(Any, type("Id", (), {"id": id})()) for id in ids]

    assert not until(sampled(3))
    assert not until(sampled(2, 3, 9))
    assert until(sampled(2, 3, 4))
    assert until(sampled(9, 9, 4, 5, 6))
    of = judge(10)
    choice = of.begin(b"")
    choice.wait = 16
    until = advised(of, Guess([*TEXT[:8], 1, 2, 3]), choice).until  # a short match may become a long one
    assert until is not None
    assert not until(sampled(4, 5, 6, 7))
    assert until(sampled(4, 5, 6, 7, 8))
    assert not until(sampled(4, 5, 6, 7, 9))
