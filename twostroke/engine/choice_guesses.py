"""What one choice has asked about guesses, and how they fared."""

from collections import defaultdict

from twostroke.engine.strokes import Guesses
from twostroke.engine.text_history import Text

MAX_WAIT = 32  # tokens that are decoded without guesses before the next look
FORGET = 0.8  # what is left of a choice's counts after a round
GUIDE = 4.0  # guesses of its own after which a choice's rate counts as much as that of all


class Acceptance:
    """How many guesses stood. A guess behind a wrong one is not counted."""

    def __init__(self, stood: float = 1.0, tried: float = 1.5) -> None:
        self.stood, self.tried = stood, tried

    def add(self, guessed: int, stood: int, forget: float = 1.0) -> None:
        self.stood = self.stood * forget + stood
        self.tried = self.tried * forget + stood + (stood < guessed)

    def rate(self, guide: float | None = None) -> float:
        """The share that stands; `guide` is what is thought before anything was tried."""
        if guide is None:
            return self.stood / self.tried
        return (self.stood + GUIDE * guide) / (self.tried + GUIDE)


class ChoiceGuesses:
    """What a choice has asked for: its text so far, how its guesses fared, and what it was told.

    A preempted choice asks again, and is told the same.
    """

    def __init__(self, text: Text) -> None:
        self.text, self.told = text, list[Guesses]()
        self._own: defaultdict[tuple[str, int], Acceptance] = defaultdict(lambda: Acceptance(0, 0))
        self.wait = 0
        self.kind: tuple[str, int] = ("", 0)  # of the last guesses: source, length of the match

    def learn(self, guessed: int, stood: int) -> None:
        self._own[self.kind].add(guessed, stood, FORGET)
        if stood:
            self.wait = 0

    def rate(self, guide: float) -> float:
        """The share of guesses like the present ones that stand."""
        return self._own[self.kind].rate(guide)

    def longer_wait(self) -> int:
        """How many tokens to decode without guesses, now that none pay: ever more."""
        self.wait = min(MAX_WAIT, max(1, 2 * self.wait))
        return self.wait
