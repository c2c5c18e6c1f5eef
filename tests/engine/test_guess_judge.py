"""How many guesses pay: by what rows cost, by how many sequences wait for them, and by how guesses fared."""

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest

from twostroke.engine.acceptance import AcceptanceByKind
from twostroke.engine.draft_guesses import MAX_WAIT, DraftGuesses
from twostroke.engine.forecast import Forecast
from twostroke.engine.guess_judge import MARGIN, ROUND_S, GuessJudge
from twostroke.engine.guess_prices import GuessPrices
from twostroke.engine.strokes import Guess, Guesses, Lookup
from twostroke.models.cost import SequenceRows

MODEL: Any = "model"


class Draft:
    """A model of which the prefix index knows the beginning of every text."""

    def __init__(self, known: int = 0) -> None:
        self.index, self.known = self, known

    def match(self, tokens: Sequence[int], salt: bytes) -> Sequence[int]:
        return tokens[: self.known]


DRAFT: Any = Draft()


class Rows(Forecast):
    """Steps of 10 ms, and some milliseconds for each row behind the first."""

    def __init__(self, row_ms: float, draft_ms: float = 4) -> None:
        self.row_ms, self.draft_ms, self.asked = row_ms, draft_ms, 0

    def placed(self, entries: Any) -> float:
        return 0.01

    def observe(self, entries: Any, predicted: float, measured: float) -> None:
        pass

    def seconds(self, model: Any, step: Sequence[SequenceRows]) -> float:
        self.asked += 1
        if isinstance(model, Draft):
            return self.draft_ms / 1e3 * max(1, sum(one.count for one in step) / 10)
        return 0.01 + self.row_ms * (sum(one.count for one in step) - 1) / 1e3


class DearRows(Rows):
    """Each row costs as much as a step."""

    def __init__(self) -> None:
        super().__init__(10)


class FreeRows(Rows):
    def __init__(self) -> None:
        super().__init__(0)

    def seconds(self, model: Any, step: Sequence[SequenceRows]) -> float:
        return 0.0


def judge(row_ms: float, sequences: int = 1, draft_ms: float = 4) -> GuessJudge:
    """Which has no time for a first try."""
    return GuessJudge(GuessPrices(lambda: Rows(row_ms, draft_ms)), None, lambda: sequences, 0.0)  # type: ignore[arg-type]


def begun(of: GuessJudge, max_tokens: int | None = None) -> DraftGuesses:
    return of.begin(100, max_tokens, b"")


def advised(
    of: GuessJudge, asks: Guess, choice: DraftGuesses | None = None, made: int = 1, draft: Any = DRAFT
) -> Guesses:
    return of.advise(asks, choice or begun(of), made, MODEL, draft)


def steps(of: GuessJudge, seconds: float) -> None:
    """Steps of 10 ms."""
    for _ in range(round(seconds / 0.01)):
        of.observe((), 0.01)


# Lookups, of a whole step ---------------------------------------------------------------------------------------------


def speeds(row_ms: float, chances: Sequence[Sequence[float]], counts: Sequence[int], sequences: int) -> float:
    """The geometric mean of all sequences' tokens per second."""
    tokens = prod(1 + sum(some[:count]) for some, count in zip(chances, counts, strict=True)) ** (1 / sequences)
    return tokens / (0.01 + row_ms * (sequences - 1 + sum(counts)) / 1e3)


@pytest.mark.parametrize("row_ms", [0.0, 0.1, 0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("sequences", [4, 5, 32])
def test_the_numbers_are_the_best_of_all(row_ms: float, sequences: int) -> None:
    """Of any numbers of guesses, none included."""
    chances = {"a": [0.9, 0.8, 0.5, 0.1], "b": [0.3], "c": [], "d": [0.99, 0.98, 0.97]}
    counts = judge(row_ms).counts(MODEL, chances, sequences, 100)
    some = list(chances.values())
    best = max(
        speeds(row_ms, some, numbers, sequences)
        for numbers in itertools.product(*(range(len(one) + 1) for one in some))
    )
    assert best / 1.02 <= speeds(row_ms, some, [counts[lane] for lane in chances], sequences) <= best * 1.000001
    if row_ms == 0:
        assert all(counts[lane] == len(some) for lane, some in chances.items())
    if row_ms == 10:
        assert not any(counts.values())


def test_a_few_do_not_gain_at_the_cost_of_many() -> None:
    sure = [0.99**i for i in range(1, 9)]
    alone = judge(0.5).counts(MODEL, {"a": sure}, 1, 100)
    assert alone["a"] == 8
    assert not judge(0.5).counts(MODEL, {"a": sure}, 16, 100).total()
    assert judge(0.5).counts(MODEL, dict.fromkeys(range(16), sure), 16, 100).total() > 16


def test_a_step_that_proves_dear_is_not_tried_again_at_once() -> None:
    """Prices follow what steps took, also those of guesses that were never timed before."""
    prices = GuessPrices(lambda: Rows(0.1))
    of, chances = GuessJudge(prices, None, lambda: 1), {lane: [0.8, 0.64] for lane in range(16)}  # type: ignore[arg-type]
    assert sum(of.counts(MODEL, chances, 16, 100).values()) == 32
    plain = prices.seconds(MODEL, 16, 0, 100)
    prices.observe(MODEL, 16, 0, 100, 1.2 * plain)
    assert prices.seconds(MODEL, 16, 0, 100) == pytest.approx(1.2 * plain)
    for _ in range(20):
        prices.observe(MODEL, 16, 32, 100, 4 * plain)
    assert prices.seconds(MODEL, 16, 32, 100) == pytest.approx(4 * plain, rel=0.1)
    assert sum(of.counts(MODEL, chances, 16, 100).values()) < 32
    for _ in range(10_000):
        prices.observe(MODEL, 16, 0, 100, 1.2 * plain)
    assert sum(of.counts(MODEL, chances, 16, 100).values()) == 32, "the machine may have changed"


def test_free_steps_are_no_error() -> None:
    prices = GuessPrices(FreeRows)
    prices.observe(MODEL, 4, 0, 100, 0.0)
    assert GuessJudge(prices, None, lambda: 1).counts(MODEL, {"a": [0.5]}, 4, 100)["a"] in (0, 1)  # type: ignore[arg-type]


def test_one_slow_step_counts_little() -> None:
    prices = GuessPrices(lambda: Rows(0.1))
    plain = prices.seconds(MODEL, 4, 0, 100)
    for _ in range(3):
        prices.observe(MODEL, 4, 0, 100, plain)
    prices.observe(MODEL, 4, 0, 100, 100 * plain)
    assert prices.seconds(MODEL, 4, 0, 100) < 1.2 * plain


# Drafts, of one sequence ----------------------------------------------------------------------------------------------


def test_a_draft_has_its_own_price() -> None:
    assert advised(judge(0.1), Guess("draft", most=8)).count in range(1, 8)
    told = advised(judge(3), Guess("draft", most=8))
    assert (told.count, told.max_tokens) == (0, 1)
    assert advised(judge(3), Guess("draft", most=8, judged=False)).count == 8


def test_the_more_sequences_wait_the_fewer_are_tried() -> None:
    def counts(of: Callable[[int], GuessJudge]) -> list[int]:
        return [advised(of(sequences), Guess("draft", most=8)).count for sequences in (1, 2, 4, 8, 16, 32)]

    found = counts(lambda sequences: judge(0.1, sequences))
    assert found == sorted(found, reverse=True)
    assert found[0]
    assert not found[-1]


@pytest.mark.parametrize("sequences", [1, 3, 6])
def test_a_draft_makes_the_product_of_speeds_greatest(sequences: int) -> None:
    of, row_s, draft_s = judge(0.2, sequences, 1), 2e-4, 1e-3
    asks, choice = Guess("draft", most=8, guessed=9, stood=9), begun(of)
    told = advised(of, asks, choice).count
    rate = choice.rate(asks)

    def product(count: int) -> float:
        plain = 0.01 + (sequences - 1) * row_s
        step = ROUND_S + plain + count * (row_s + draft_s)
        return sum(rate**ahead for ahead in range(count + 1)) * (plain / step) ** sequences

    best = max(range(9), key=product)
    assert told == (best if product(best) > MARGIN else 0)
    assert (told > 0) == (sequences < 6)


def test_what_a_salt_has_learned_says_little_of_another() -> None:
    """Texts of one repeat four tokens of their prompts at a time, and those of the other three."""
    of, starts, right, wrong = judge(0), range(0, 50, 5), 0.0, 0.0

    def chance(salt: bytes, text: int, repeated: int) -> float:
        found, prompt = of.lookup(Lookup(), salt), range(100 * text, 100 * text + 60)
        found.begin(prompt)
        for start in starts:
            for token in (*prompt[start : start + repeated], -1):
                found.add(token)
        for token in prompt[50:53]:
            found.add(token)
        return found.chances(1)[0] if found.chances(1) else 0.0

    for text in range(8):
        right, wrong = chance(b"right", 2 * text, 4), chance(b"wrong", 2 * text + 1, 3)
    new = of.lookup(Lookup(), b"new")
    new.begin([*range(60), 0, 1, 2])
    assert wrong < 0.1 < 0.4 < new.chances(1)[0] < 0.6 < 0.9 < right


def test_guesses_that_fail_become_rare_and_never_cease() -> None:
    of = judge(0.1)
    choice = begun(of)
    told, rounds = advised(of, Guess("draft"), choice), 0
    while told.count:
        told = advised(of, Guess("draft", guessed=told.count, stood=0), choice)
        rounds += 1
    assert rounds < 12
    for _ in range(8):
        told = advised(of, Guess("draft"), choice)
    assert told == Guesses(0, MAX_WAIT)
    steps(of, 1)
    assert advised(of, Guess("draft"), choice).count == 1, "by now a guess takes a small share of the time"
    assert advised(of, Guess("draft", guessed=1, stood=0), choice).count == 0
    for _ in range(20):
        told = advised(of, Guess("draft", guessed=4, stood=4), choice)
    assert told.count > 2, "it has learned that they are good again"


@pytest.mark.parametrize("streams", [1, 4, 32])
def test_guesses_that_never_stand_take_a_small_share_of_the_time(streams: int) -> None:
    """However many sequences try, and also where each must be read first; none where right ones would not pay."""
    of, unread = judge(0.1, streams, 1), range(200)
    choices, waits, tried, total = [begun(of) for _ in range(streams)], [0] * streams, 0.0, 0.0
    told = [Guesses(0, 1)] * streams
    for step in range(20_000):
        for i, choice in enumerate(choices):
            waits[i] -= 1
            if waits[i] <= 0:
                last, told[i] = told[i], advised(of, Guess("draft", 32, True, unread, told[i].count, 0), choice, step)
                waits[i] = told[i].max_tokens or 1
                if step > 100 and told[i].count:
                    assert last.count == 0
                    tried += 0.001 * 20 + 0.0001
        steps(of, 0.01)
        total += 0.01
    assert tried < 0.02 * total
    assert (tried > 0) == (streams < 32)


def test_a_draft_of_which_nothing_is_known_is_tried_once() -> None:
    of = GuessJudge(GuessPrices(lambda: Rows(0.1, 1)), None, lambda: 1)  # type: ignore[arg-type]
    dear = Guess("draft", 8, True, range(5000))
    assert [advised(of, dear, of.begin(5000, 40, b"")).count for _ in range(3)] == [1, 0, 0]


def test_where_right_guesses_would_not_pay_it_is_seldom_asked() -> None:
    assert advised(judge(0.1, 32), Guess("draft", most=8)) == Guesses(0, MAX_WAIT)
    of = judge(0.1, 1, 1)
    assert advised(of, Guess("draft", 8, True, range(2000)), begun(of, 20)) == Guesses(0, 1), "soon, where they would"


def test_time_in_which_guesses_pay_is_not_saved_for_tries() -> None:
    def then(seconds: float) -> list[int]:
        of = judge(0.1, 1, 1)
        choice = begun(of)
        steps(of, seconds)
        assert advised(of, Guess("draft", 8, guessed=9, stood=9), choice).count > 1
        return [advised(of, Guess("draft", 8, guessed=9, stood=0), begun(of)).count for _ in range(80)]

    assert then(100) == then(0)
    assert then(0)[-1] == 0


def test_what_a_draft_reads_first_must_pay_within_the_answer() -> None:
    """It reads a token in 0.1 ms, and so 2,000 in the time of 20 steps."""
    good = Guess("draft", 8, True, range(2000), 9, 9)

    def counts(draft: Any, *answers: tuple[int | None, int], sequences: int = 1) -> list[bool]:
        told = []
        for max_tokens, made in answers:
            of = judge(0.1, sequences, 1)
            told.append(bool(advised(of, good, of.begin(2000 - made, max_tokens, b""), made, draft).count))
        return told

    assert counts(Draft(), (20, 1), (None, 1), (400, 300), (None, 300)) == [False, True, True, True]
    assert counts(Draft(), (None, 1), (None, 300), (310, 300), sequences=2) == [False, True, False]
    assert counts(Draft(1990), (20, 1), (None, 1), sequences=4) == [True, True], "the index knows nearly all of it"
    of = judge(0.1, 1, 1)
    told = advised(of, Guess("draft", 8, True, range(2), 9, 9), of.begin(100, 20, b""), 1)
    assert told.count > 0, "what it read before is not paid again"


def test_no_more_is_guessed_than_the_answer_may_have() -> None:
    of = judge(0.0, 1, 0.1)
    choice = begun(of, 20)
    asks = Guess("draft", 8, guessed=30, stood=30)
    assert [advised(of, asks, choice, made).count for made in (1, 15, 18, 19)] == [8, 4, 1, 0]


def test_what_others_learned_guides_a_new_choice() -> None:
    of_all = AcceptanceByKind()
    one, other = AcceptanceByKind(of_all), AcceptanceByKind(of_all)
    before = other.rate(5)
    for _ in range(50):
        one.add(5, 1, 0)
    assert one.rate(5) < other.rate(5) < before / 2
    assert other.rate(6) == before
    for _ in range(50):
        other.add(5, 1, 1)
    assert other.rate(5) > 0.9
