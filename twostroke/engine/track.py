"""The tokens a choice has generated: their text, and when they have come to an end."""

from dataclasses import dataclass

from twostroke.checkpoints.textstream import StopStrings
from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.engine.sampler import Sampled
from twostroke.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Token:
    """A generated token, as the caller sees it.

    Attributes:
        id: its id.
        text: the text that became certain with it (a character may span tokens; the texts of all tokens
            concatenated are the whole text). An ending token has none of its own.
        logprob: its log-probability under the model, before temperature and penalties.
        top_logprobs: the most likely alternatives as (id, logprob), if asked for.
        index: its place among the choice's tokens.
        choice: which of n choices.
        finish_reason: "stop" or "length" on the last token.
    """

    id: int
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] | None
    index: int
    choice: int
    finish_reason: str | None


class Track:
    """Collects sampled tokens until one ends it: an ending token, a stop string, or max_tokens."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, choice: int) -> None:
        self.params, self.choice = params, choice
        self.sampled: list[Sampled] = []
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.ending_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        self._text = tokenizer.stream()
        self._stops = StopStrings(params.stop)

    def push(self, sampled: Sampled, full: bool = False) -> Token:
        """Add a token. Sets `finish_reason` if it is the last, as it is when the context is `full`."""
        self.sampled.append(sampled)
        self.ids.append(sampled.id)
        armed = len(self.ids) >= self.params.min_tokens
        if armed and sampled.id in self.ending_ids:
            # Its own text, if it has any, is not part of the answer.
            return self._token(sampled, self._end("stop"))
        text, stop = self._text.push(sampled.id), None
        if armed and self.params.stop:
            text, stop = self._stops.push(text)
        if stop is not None:
            self.finish_reason = "stop"
        elif full or (self.params.max_tokens is not None and len(self.ids) >= self.params.max_tokens):
            text += self._end("length")
        return self._token(sampled, text)

    def _end(self, reason: str) -> str:
        """Finish, and return the text that was held back."""
        self.finish_reason = reason
        rest, stop = self._stops.push(self._text.flush())
        return rest if stop is not None else rest + self._stops.flush()

    def _token(self, s: Sampled, text: str) -> Token:
        return Token(s.id, text, s.logprob, s.top, len(self.ids) - 1, self.choice, self.finish_reason)
