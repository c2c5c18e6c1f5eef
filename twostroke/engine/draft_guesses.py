"""What one choice has asked about a draft's guesses, and how they fared."""

from twostroke.engine.acceptance import FORGET_OWN, AcceptanceByKind
from twostroke.engine.strokes import Guess, Guesses

MAX_WAIT = 32  # tokens that are decoded without guesses before the next try


class DraftGuesses:
    """Of one choice. A preempted choice asks again, and is told the same."""

    def __init__(self, of_all: AcceptanceByKind) -> None:
        self.told = list[Guesses]()
        self.given_up = False  # whether no guess is told any more
        self._acceptance = AcceptanceByKind(of_all, FORGET_OWN)
        self.wait = 0

    def learn(self, asks: Guess) -> None:
        """How the last guesses fared."""
        if asks.guessed:
            self._acceptance.add(asks.source, asks.guessed, asks.stood)
        if asks.stood:
            self.wait = 0

    def rate(self, asks: Guess) -> float:
        """The share of guesses like those asked for that stand."""
        return self._acceptance.rate(asks.source)

    def longer_wait(self) -> int:
        """How many tokens to decode without guesses, now that none pay: ever more."""
        self.wait = min(MAX_WAIT, max(1, 2 * self.wait))
        return self.wait
