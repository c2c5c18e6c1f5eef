"""Decides how many guesses of the next tokens pay, so that speculation is never slower than plain decoding.

A guess costs a row of a step, which all sequences of the step wait for, and perhaps a step of a draft. It yields a
token if it and those before it are right. So the most tokens per second are expected from some number of guesses, which
may be none: in a full batch a row costs nearly a token's time.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from twostroke.engine.choice_guesses import MAX_WAIT, Acceptance, ChoiceGuesses
from twostroke.engine.forecast import Forecast
from twostroke.engine.model import Model
from twostroke.engine.strokes import Guess, Guesses
from twostroke.engine.text_history import NGRAM, Text, TextHistory
from twostroke.models.cost import SequenceRows
from twostroke.sampling.draw import Sampled

ROUND_S = 2e-4  # of the program and the engine, for a round of guesses
MARGIN = 1.02  # by which a round must be expected to be quicker
MAX_KIND = 8  # tokens of a match beyond which a longer one says no more
MAX_KNOWN = 4096  # shapes of steps whose seconds are kept


class GuessJudge:
    """One for an engine: what all choices have read and said, and how guesses of each kind fared."""

    def __init__(self, forecast: Callable[[], Forecast], decoding: Callable[[], int]) -> None:
        """`forecast`: predicts steps; `decoding`: how many sequences decode now."""
        self._forecast, self._decoding = forecast, decoding
        self.history = TextHistory()
        self._all: defaultdict[tuple[str, int], Acceptance] = defaultdict(Acceptance)
        self._known: dict[tuple[Model, int, int, int], float] = {}

    def begin(self, salt: bytes) -> ChoiceGuesses:
        return ChoiceGuesses(self.history.begin(salt))

    def advise(self, asks: Guess, choice: ChoiceGuesses, model: Model, draft: Model | None) -> Guesses:
        """How many guesses to try now, and what they are where no draft makes them."""
        text = choice.text
        text.extend(asks.tokens)
        if asks.guessed:
            choice.learn(asks.guessed, asks.stood)
            self._all[choice.kind].add(asks.guessed, asks.stood)
        found = text.continuation(asks.most) if draft is None else None
        guesses = [] if found is None else list(found.tokens)
        choice.kind = (asks.source or "", 0 if found is None else min(found.match, MAX_KIND))
        count = most = len(guesses) if draft is None else asks.most
        if asks.judged and asks.most:
            count = self._count(choice.rate(self._all[choice.kind].rate()), most, choice, model, draft)
            if not count and choice.wait == MAX_WAIT:
                count = min(most, 1)  # now and then: guesses may have become good
                choice.wait //= 2  # and then as many tokens without
        if count:
            told = Guesses(guesses[:count], count)
        elif draft is not None:
            told = Guesses((), 0, max_tokens=choice.longer_wait())
        else:
            expected = guesses[: MAX_KIND - choice.kind[1]]
            told = Guesses((), 0, until=_until_seen(text, choice.longer_wait(), expected))
        choice.told.append(told)
        return told

    def _count(self, rate: float, most: int, choice: ChoiceGuesses, model: Model, draft: Model | None) -> int:
        """The number of guesses of which the most tokens per second are expected; 0: none pays."""
        sequences, context = self._decoding(), 1 << len(choice.text.ids).bit_length()
        best, found, more = MARGIN * sequences / self._step_s(model, sequences, 0, context), 0, 0.0
        share = 1.0
        for count in range(1, most + 1):
            share *= rate
            more += share
            seconds = ROUND_S + self._step_s(model, sequences, count, context)
            if draft is not None:
                seconds += count * self._step_s(draft, 1, 0, context)
            if (sequences + more) / seconds <= best:
                if found or count > 4:  # a row may be dear where instructions for more rows begin
                    break
                continue
            best, found = (sequences + more) / seconds, count
        return found

    def _step_s(self, model: Model, sequences: int, guesses: int, context: int) -> float:
        """Seconds of a step of sequences that each make a token, one of them behind so many guesses."""
        shape = model, sequences, guesses, context
        if (known := self._known.get(shape)) is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            alone = [SequenceRows(1, context, 1)] * (sequences - 1)
            step = [*alone, SequenceRows(1 + guesses, context, 1 + guesses)]
            known = self._known[shape] = self._forecast().seconds(model, step)
        return known


def _until_seen(text: Text, wait: int, expected: Sequence[int]) -> Callable[[Sequence[Sampled]], bool]:
    """Whether a short match has become a long one, or enough tokens were sampled and the last few occurred before."""

    def ask_again(sampled: Sequence[Sampled]) -> bool:
        if expected and len(sampled) == len(expected) and [one.id for one in sampled] == expected:
            return True
        return len(sampled) >= wait and text.occurs([one.id for one in sampled[-NGRAM:]])

    return ask_again
