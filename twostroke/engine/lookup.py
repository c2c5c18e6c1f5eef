"""Prompt lookup of one decode: what followed its last few tokens before, and how likely that is to follow again.

A look costs nothing but the look: as each token comes it is compared with what followed before, whether that was tried
as a guess or not. So it is known how guesses fare without any trial.
"""

from collections.abc import Sequence

from twostroke.engine.acceptance import FORGET_OWN, AcceptanceByKind
from twostroke.engine.strokes import Lookup
from twostroke.engine.text_history import Text, TextPlace

MIN_CHANCE = 0.05  # guesses that are less likely to stand are not considered


class LookupGuesses:
    """Of one decode, also after a preemption."""

    def __init__(self, asked: Lookup, text: Text, of_salt: AcceptanceByKind) -> None:
        """`text`: of this decode, empty; `of_salt`: how guesses of decodes with the same salt fared, by their kind."""
        self.asked, self.text, self._acceptance = asked, text, AcceptanceByKind(of_salt, FORGET_OWN)
        self._place: TextPlace | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """The tokens before those that are decoded."""
        self.text.extend(prompt)
        self._place = self.text.find()

    def add(self, token: int) -> None:
        """Another token was decoded."""
        place, right = self._place, False
        if place is not None:
            right = place.next_token == token
            self._acceptance.add(_kind(place.match, place.text is self.text), 1, right)
        self.text.add(token)
        self._place = (place.moved() if place is not None and right else None) or self.text.find()

    @property
    def found(self) -> bool:
        """Whether there is anything to guess."""
        return self._place is not None

    def guesses(self, most: int) -> Sequence[int]:
        """What followed before, at most so many tokens."""
        return () if self._place is None else self._place.tokens(most)

    def chances(self, count: int) -> list[float]:
        """The chance of each of the next guesses to stand, which those before it must: ever smaller.

        At most `count`, and none below `MIN_CHANCE`.
        """
        chances: list[float] = []
        if self._place is None:
            return chances
        chance, rate, kind = 1.0, 0.0, -1
        match, own = self._place.match, self._place.text is self.text
        for ahead in range(count):
            if (other := _kind(match + ahead, own)) != kind:
                kind, rate = other, self._acceptance.rate(other)
            chance *= rate
            if chance < MIN_CHANCE:
                break
            chances.append(chance)
        return chances


def _kind(match: int, own: bool) -> int:
    """Guesses behind matches of about the same length, in their own text or in another, are of one kind."""
    return 2 * (match if match < 8 else 8 if match < 12 else 12 if match < 20 else 20) + own
