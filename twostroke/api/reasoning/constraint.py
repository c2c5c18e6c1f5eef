"""Lets a grammar begin behind a thought, and ends a thought that has taken as many tokens as it may."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twostroke.api.reasoning.forms import ReasoningForm
from twostroke.api.reasoning.reader import Phase, arriving
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.constraint import Constraint, ConstraintFactory


class ReasoningTokens:
    """A form's marks as tokens of a vocabulary, and the masks that follow from them. Safe to share between threads."""

    def __init__(self, form: ReasoningForm, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.form, self._tokenizer = form, tokenizer
        marks = form.opener + form.closer + form.after + form.lead
        # special tokens that marks are made of
        self.shown = frozenset(id for id in tokenizer.special_ids if tokenizer.token_text(id) in marks)
        opener = form.opener.rstrip()
        # how the beginning of a thought may be written
        self.openers = [self.encode(opener), self.encode(f"{opener}\n")]
        self.everything = np.ones(vocab_size, bool)  # the mask that allows all ids
        self.everything.setflags(write=False)

    def encode(self, text: str) -> list[int]:
        """The ids of markup."""
        return self._tokenizer.encode(text, add_bos=False) if text else []

    def text_stream(self) -> Callable[[int], str]:
        """Tells the text that each token completes, marks included."""
        return self._tokenizer.stream(shown=self.shown).push

    def only(self, ids: Sequence[int]) -> np.ndarray:
        """The mask of these ids."""
        mask = np.zeros(len(self.everything), bool)
        mask[list(ids)] = True
        return mask

    def prepare(self) -> None:
        """Read the vocabulary now, so that no step waits for it."""
        self.within("")

    @cached_property
    def _ends(self) -> list[tuple[int, str]]:
        """The tokens, besides the closer itself, that may complete it: those that have its last character."""
        last = self.form.closer[-1]
        texts = ((id, self._tokenizer.token_text(id)) for id in range(len(self.everything)))
        return [(id, text) for id, text in texts if last in text and text != self.form.closer]

    @cached_property
    def _within(self) -> np.ndarray:
        """The mask within a thought that a grammar follows: the answer's end, and tokens with its beginning, wait."""
        mask = self.everything.copy()
        mask[[id for id in self._tokenizer.eos_ids if id < len(mask)]] = False
        mask[[id for id, text in self._ends if self._spills(text)]] = False
        return mask

    def within(self, tail: str) -> np.ndarray:
        """The same where the thought ends with `tail`, which may be a part of the closer."""
        if not (size := arriving(tail, self.form.closer)):
            return self._within
        mask = self._within.copy()
        mask[[id for id, text in self._ends if self._spills(tail[len(tail) - size :] + text)]] = False
        return mask

    def _spills(self, text: str) -> bool:
        _, closed, rest = text.partition(self.form.closer)
        return bool(closed) and not self.form.after.startswith(rest)


@dataclass(frozen=True)
class ReasoningConstraintFactory:
    """Makes a `ReasoningConstraint` for each choice."""

    tokens: ReasoningTokens  # the marks
    phase: Phase  # where the prompt ends
    answer: ConstraintFactory | None  # makes the constraint of the answer, if it has one
    budget: int | None  # the most tokens of a thought, None for any number
    lead: bool  # whether the answer's own markup must come before what `answer` constrains

    def __call__(self) -> Constraint:
        return ReasoningConstraint(self)

    def answer_after(self, markup: str) -> "_Answer":
        """The constraint of an answer that `markup` comes before: it must, in harmony, and may elsewhere."""
        lead = self.tokens.encode(markup) if self.answer is not None and self.lead else []
        return _Answer(self.tokens, lead, self.tokens.form.messages, None if self.answer is None else self.answer())


class ReasoningConstraint(Constraint):
    """Allows anything in a thought, until its budget is spent. Then its end follows, and the answer's constraint."""

    def __init__(self, made_by: ReasoningConstraintFactory) -> None:
        self._made_by, self._tokens = made_by, made_by.tokens
        self._text_of = self._tokens.text_stream()
        self._phase, self._text = made_by.phase, ""  # the text of the part that the phase is about
        self._spent = 0  # tokens of thoughts
        self._forced: list[int] = []
        self._openers = list(self._tokens.openers)
        self._answer: _Answer | None = made_by.answer_after(self._tokens.form.lead)  # None: the text is none of it
        self._spend(0)

    def mask(self) -> np.ndarray:
        if self._forced:
            return self._tokens.only(self._forced[:1])
        if self._phase is Phase.THOUGHT:
            if self._made_by.answer is None:
                return self._tokens.everything
            return self._tokens.within(self._text)
        mask = self._tokens.only(()) if self._answer is None else self._answer.mask()
        if self._phase is Phase.UNDECIDED and self._made_by.answer is not None:
            mask = mask.copy()
            mask[[ids[0] for ids in self._openers]] = True
        return mask

    def advance(self, token: int) -> None:
        self._text += self._text_of(token)
        if self._forced:
            self._forced.pop(0)
            if not self._forced:
                self._end("")
        elif self._phase is Phase.THOUGHT:
            before, closed, rest = self._text.partition(self._tokens.form.closer)
            if closed:
                self._end(self._tokens.form.after.removeprefix(rest))
            else:
                self._text = before[-len(self._tokens.form.closer) :]
                self._spend(1)
        elif self._phase is Phase.UNDECIDED:
            self._decide(token)
        elif self._answer is not None:
            self._answer.advance(token)

    @property
    def finished(self) -> bool:
        return self._phase is Phase.ANSWER and self._answer is not None and self._answer.finished

    def _decide(self, token: int) -> None:
        opener, body = self._tokens.form.opener.rstrip(), self._text.lstrip()
        self._openers = [ids[1:] for ids in self._openers if ids[0] == token and len(ids) > 1]
        if body.startswith(opener):
            self._phase, self._text = Phase.THOUGHT, body.removeprefix(opener)
            self._spend(0)
            return
        undecided = opener.startswith(body)
        if self._answer is not None and not (undecided and _forbids(self._answer, token)):
            self._answer.advance(token)
        else:
            self._answer = None
        if not undecided:
            self._phase = Phase.ANSWER

    def _spend(self, count: int) -> None:
        """Count tokens of a thought, and close it if that is all that it may have."""
        self._spent += count
        if self._phase is Phase.THOUGHT and self._made_by.budget is not None and self._spent >= self._made_by.budget:
            form = self._tokens.form
            begun = arriving(self._text, form.closer)
            closer = form.closer[begun:] if begun else form.before + form.closer
            self._forced = self._tokens.encode(closer + form.after)

    def _end(self, markup: str) -> None:
        """The thought is over; `markup` is left of what comes before the answer."""
        self._phase, self._text = Phase.ANSWER, ""
        self._answer = self._made_by.answer_after(markup)


def _forbids(constraint: "_Answer", token: int) -> bool:
    mask = constraint.mask()
    return token >= len(mask) or not mask[token]


class _Answer:
    """The answer's constraint behind markup, which must come first or may be left out."""

    def __init__(self, tokens: ReasoningTokens, lead: list[int], needed: bool, constraint: Constraint | None) -> None:
        self._tokens, self._lead, self._needed, self._constraint = tokens, lead, needed, constraint

    def mask(self) -> np.ndarray:
        if self._lead and self._needed:
            return self._tokens.only(self._lead[:1])
        if self._constraint is None:
            return self._tokens.everything
        mask = self._constraint.mask()
        if not self._lead:
            return mask
        also = self._tokens.only(self._lead[:1])
        also[: len(mask)] |= mask[: len(also)]
        return also

    def advance(self, token: int) -> None:
        if self._lead[:1] == [token]:
            self._lead = self._lead[1:]
            self._needed |= self._tokens.form.around is not None  # a mark that has begun is written to its end
            return
        self._lead = []
        if self._constraint is not None:
            self._constraint.advance(token)

    @property
    def finished(self) -> bool:
        return not (self._lead and self._needed) and self._constraint is not None and self._constraint.finished
