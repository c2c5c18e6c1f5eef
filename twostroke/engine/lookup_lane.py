"""A decode stroke that guesses all along what followed its last few tokens before."""

from collections.abc import Sequence
from typing import Any

from twostroke.engine.decode_lane import DecodeLane, in_vocabulary
from twostroke.engine.lookup import LookupGuesses
from twostroke.engine.strokes import GuessRound
from twostroke.errors import InvalidRequest
from twostroke.sampling.draw import Sampled


class LookupLane(DecodeLane):
    """Enters guesses behind its next token, as many as it is told before a step.

    A token is sampled behind each, as long as they prove right. Entries behind a wrong one are removed, and it goes on:
    no stroke ends, and its program does not wake.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.guesses or self.stroke.queries or self.stroke.states:
            raise InvalidRequest("a decode with lookup takes no guesses, and returns no queries and no hidden states")
        self._tried: list[int] = []  # guesses of the step
        self._stood = 0

    @property
    def lookup(self) -> LookupGuesses:
        found = self.record.lookup
        assert found is not None, "it was set when the stroke was opened"
        return found

    @property
    def num_guesses(self) -> int:
        return 0 if self.stroke.lookup is None else self.stroke.lookup.most

    @property
    def num_next(self) -> int:
        return 1 + len(self._tried)

    @property
    def decoding(self) -> bool:
        return len(self.todo) == self.num_next

    @property
    def may_guess(self) -> bool:
        return bool(self._tried) or self.lookup.found

    def offered_guesses(self) -> Sequence[int]:
        """What it could guess in the next step; no token is sampled in vain."""
        stroke, record = self.stroke, self.record
        if len(self.todo) != 1 or self._tried or self.has_placeholder or self.missing or record.complete:
            return ()
        if stroke.lookup is None or not self.lookup.found:
            return ()
        left = min(self._room - len(record.sampled), stroke.lookup.most + 1)
        if stroke.max_tokens is not None:
            left = min(left, stroke.max_tokens - len(record.sampled))
        if (most := self.output.params.max_tokens) is not None:
            left = min(left, most - len(self.output.ids))
        return in_vocabulary(self.lookup.guesses(left - 1), self.model) if left > 1 else ()

    def guess(self, tokens: Sequence[int]) -> None:
        """Enter these behind the next token."""
        self._tried, self._stood = [*tokens], 0
        self.todo += self._tried

    def logit_rows(self, count: int) -> int:
        return count if self._tried else super().logit_rows(count)

    def drop_guesses(self) -> bool:
        if not self._tried or not self.todo:
            return False
        self._tried = []
        del self.todo[1:]
        return True

    def sampled(self, token: Sampled) -> None:
        self.lookup.add(token.id)
        super().sampled(token)

    def _entered(self, token: int) -> bool:
        if not self._tried:
            return super()._entered(token)
        if self._tried[self._stood : self._stood + 1] == [token]:
            self._stood += 1
            return True
        wrong = len(self._tried) - self._stood
        self._end_round()
        self.writer.truncate(len(self.writer) - wrong)
        self.num_computed -= wrong
        self._rows.clear()
        self._num_drawn = 0
        return False

    def _num_wrong(self, entered: bool) -> int:
        if not (entered and self._tried):
            return super()._num_wrong(entered)
        wrong = len(self._tried) - self._stood + 1
        self._end_round()
        return wrong

    def _end_round(self) -> None:
        self.record.rounds.append(GuessRound(tuple(self._tried), self._stood))
        self._tried = []
