"""What one choice has asked about a draft's guesses, and how they fared."""

from twostroke.engine.acceptance import FORGET_OWN, AcceptanceByKind
from twostroke.engine.strokes import Guess, Guesses

MAX_WAIT = 32  # tokens that are decoded without guesses before the next question
MIN_REST = 64  # tokens that a new answer is thought to have, unless it may have fewer only


class DraftGuesses:
    """Of one choice. A preempted choice asks again, and is told the same."""

    def __init__(
        self, of_all: AcceptanceByKind, prompt_tokens: int, max_tokens: int | None, salt: bytes, asked_at: float
    ) -> None:
        """`max_tokens`: of its answer; `salt`: of its request; `asked_at`: seconds of all steps until it asks."""
        self.prompt_tokens, self.max_tokens, self.salt, self.asked_at = prompt_tokens, max_tokens, salt, asked_at
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

    def left(self, made: int) -> int:
        """The most tokens that an answer may have after so many."""
        return 1 << 30 if self.max_tokens is None else self.max_tokens - made

    def rest(self, made: int) -> int:
        """How many tokens the answer is thought to have after so many: as many again.

        Nobody knows its end. So what is spent on the rest is at most about twice what it would have been with a look at
        the end: the rule of those who rent skis (Karlin et al. 1988).
        """
        return min(max(made, MIN_REST), self.left(made))

    def longer_wait(self) -> int:
        """How many tokens to decode without guesses, now that none pay: ever more."""
        self.wait = min(MAX_WAIT, max(1, 2 * self.wait))
        return self.wait
