"""How guesses fared, by their kind."""

from collections import defaultdict
from collections.abc import Hashable

GUIDE = 4.0  # guesses of its own after which a choice's rate counts as much as that of all
FORGET_ALL, FORGET_OWN = 0.999, 0.97  # what is left of counts after another guess: all choices', and one's own


class Acceptance:
    """How many guesses stood. A guess behind a wrong one is not counted."""

    def __init__(self, stood: float = 1.0, tried: float = 1.5) -> None:
        self.stood, self.tried = stood, tried

    def add(self, guessed: int, stood: int, forget: float = 1.0) -> None:
        more = stood + (stood < guessed)
        left = forget**more
        self.stood = self.stood * left + stood
        self.tried = self.tried * left + more

    def rate(self, guide: float | None = None) -> float:
        """The share that stands; `guide` is what is thought before anything was tried."""
        if guide is None:
            return self.stood / self.tried
        return (self.stood + GUIDE * guide) / (self.tried + GUIDE)


class AcceptanceByKind:
    """How guesses of each kind fared: those of one choice or of one salt, guided by those of more."""

    def __init__(self, of_more: "AcceptanceByKind | None" = None, forget: float = FORGET_ALL) -> None:
        """`of_more`: what is thought of a kind of which there was nothing yet; None: these are of all."""
        self._of_more, self._forget = of_more, forget
        self._kinds: defaultdict[Hashable, Acceptance] = defaultdict(
            Acceptance if of_more is None else lambda: Acceptance(0, 0)
        )

    def add(self, kind: Hashable, guessed: int, stood: int) -> None:
        self._kinds[kind].add(guessed, stood, self._forget)
        if self._of_more is not None:
            self._of_more.add(kind, guessed, stood)

    def rate(self, kind: Hashable) -> float:
        """The share of guesses of a kind that stands."""
        return self._kinds[kind].rate(None if self._of_more is None else self._of_more.rate(kind))
