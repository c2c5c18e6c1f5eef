"""The tokens that a choice has generated, their text, and the check for the end."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.text_stream import StopStrings
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.draw import Sampled
from twostroke.sampling.exclusions import Exclusions
from twostroke.sampling.params import SamplingParams


@dataclass(frozen=True)
class Token:
    """A generated token, as the caller sees it.

    Attributes:
        id: its id.
        text: the text that became certain with it (a character may span tokens; the concatenation of all tokens'
            texts is the whole text). The text of an ending token itself is left out.
        logprob: its log-probability in nats under the model, before temperature and penalties; None if not requested.
        top_logprobs: the most likely alternatives as (id, logprob); None unless `logprobs` is set.
        index: its index among the choice's tokens.
        choice: index of the choice.
        finish_reason: "stop" or "length" on the last token, None before.
        stop: the stop string that ended the choice, on the last token; None if something else ended it.
    """

    id: int
    text: str
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...] | None
    index: int
    choice: int
    finish_reason: str | None
    stop: str | None = None


class ChoiceOutput:
    """Collects sampled tokens until one ends it: an ending token, a stop string, a constraint's end, or max_tokens."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, choice: int) -> None:
        self.params, self.choice, self._tokenizer = params, choice, tokenizer
        self.sampled: list[Sampled] = []
        self.ids: list[int] = []
        self.finish_reason: str | None = "length" if params.max_tokens == 0 else None
        self.constraint = None if params.constraint is None else params.constraint()
        self.ending_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        self._reader = None if params.reader is None else params.reader()
        self._text = tokenizer.stream(
            skip_special=params.skip_special_tokens, shown=frozenset() if params.reader is None else params.reader.shown
        )
        self._exclusions: Exclusions | None = None
        if params.excludes:
            self._exclusions = Exclusions(params, partial(tokenizer.encode, add_bos=False))
        self._stops = StopStrings(params.stop)

    def fork(self) -> "ChoiceOutput":
        """A copy of this track, for tokens that are not emitted yet."""
        other = ChoiceOutput(self.params, self._tokenizer, self.choice)
        for sampled in self.sampled:
            other.push(sampled)
        return other

    def allowed(self, vocab_size: int) -> np.ndarray | None:
        """Bool [n] of the ids that may come next; ids >= n may not. None for all. Raises InvalidRequest if none may."""
        grammar = None if self.constraint is None else _checked(self.constraint.mask())
        return grammar if self._exclusions is None else self._exclusions.mask(self.ids, vocab_size, grammar)

    def push(self, sampled: Sampled, full: bool = False) -> Token:
        """Add a token. Sets `finish_reason` if the token is the last, as it is when the context is `full`."""
        self.sampled.append(sampled)
        self.ids.append(sampled.id)
        armed = len(self.ids) > self.params.min_tokens
        if armed and sampled.id in self.ending_ids:
            # The ending token's own text, if any, is not part of the answer.
            return self._token(sampled, self._end("stop"))
        if self.constraint is not None:
            self.constraint.advance(sampled.id)
        text, stopped = self._scan(self._text.push(sampled.id), armed)
        if stopped:
            self.finish_reason = "stop"
        elif self.constraint is not None and self.constraint.finished:
            text += self._end("stop", armed)
        elif full or (self.params.max_tokens is not None and len(self.ids) >= self.params.max_tokens):
            text += self._end("length", armed)
        return self._token(sampled, text)

    def end_with_length(self) -> str:
        """End after the last token, since there is no room for another. Returns the text that was held back."""
        return self._end("length", len(self.ids) > self.params.min_tokens)

    def _end(self, reason: str, armed: bool = True) -> str:
        """Finish, and return the text that was held back."""
        self.finish_reason = reason
        rest, stopped = self._scan(self._text.flush(), armed, ended=True)
        return rest if stopped else rest + self._stops.flush()

    def _scan(self, text: str, armed: bool, ended: bool = False) -> tuple[str, bool]:
        """Returns (certain text, whether a stop string ends it). If not `armed`, stop strings count as plain text."""
        if self._reader is None:
            return self._stop(text, armed)
        certain = ""
        for span in self._reader.spans(text, ended):
            if span.plain:
                piece, stopped = self._stop(span.written, armed)
                certain += piece
                if stopped:
                    return certain, True
            else:  # a stop string does not reach into it either
                certain += self._stops.flush() + span.written
        return certain, False

    def _stop(self, text: str, armed: bool) -> tuple[str, bool]:
        if armed:
            certain, stop = self._stops.push(text)
            return certain + (stop or "" if self.params.include_stop_str_in_output else ""), stop is not None
        certain = ""
        while text and self.params.stop:
            char, text = text[0], text[1:]
            piece, stop = self._stops.push(char)
            certain += piece
            if stop is not None:
                # Another stop string may begin at its second character.

                self._stops = StopStrings(self.params.stop)
                certain, text = certain + stop[0], stop[1:] + text
        return certain + text, False

    def _token(self, s: Sampled, text: str) -> Token:
        return Token(
            s.id, text, s.logprob, s.top, len(self.ids) - 1, self.choice, self.finish_reason, self._stops.matched
        )


def _checked(mask: np.ndarray) -> np.ndarray:
    """A constraint's mask, which is code from outside. Raises InvalidRequest unless it is a list of booleans."""
    allowed = np.asarray(mask)
    if allowed.ndim != 1 or allowed.dtype != bool:
        raise InvalidRequest(f"a constraint's mask must be bool [n], not {allowed.dtype} {list(allowed.shape)}")
    return allowed
