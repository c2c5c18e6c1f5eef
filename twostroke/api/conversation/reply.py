"""A conversation's reply as it is made."""

from collections.abc import Callable, Iterator

from twostroke.api.completion import Decoding
from twostroke.api.conversation.fitting import LeftOut
from twostroke.api.conversation.overflow import Turn
from twostroke.api.reasoning.reasoning import parts_reader
from twostroke.engine.output import Token
from twostroke.engine.timings import Timings
from twostroke.kv.cache import KVCache


class Reply(Iterator[Token]):
    """The tokens of a reply as they are made. If it is closed early, the tokens so far are the reply.

    Attributes:
        messages: what the reply answers, the user's message last; prompt: the same, rendered.
        left_out: what there was no room for.
        reused: number of entries that were already there; entered: number of entries that this turn's prompt added.
        recomputed: number of entries dropped because the template changed their text (0 in an ordinary turn).
        text: the answer so far, without special tokens and stop strings; thought: what comes before it, set apart.
        tokens: the tokens so far; max_tokens: the most that it may have, None for all that the context allows.
        timings: its arrival is the time of the call to `say`.
    """

    recomputed = 0
    left_out = LeftOut()

    def __init__(
        self,
        turn: Turn,
        start: KVCache,
        decoding: Decoding,
        arrival: float,
        on_end: "Callable[[Reply, KVCache | None, list[int]], None]",
    ) -> None:
        """`on_end` is told the value at the end, None if there is no token, and the tokens to enter behind it."""
        self.messages, self.prompt, self.reused = turn.messages, turn.prompt, len(turn.base)
        params = decoding.request.params
        self.tokens, self.max_tokens = decoding.tokens, params.max_tokens
        self.thought = self.text = ""
        self._parts = parts_reader(params)
        self._start: KVCache | None = start  # this and _decoding hold pages until the reply is over
        self._decoding: Decoding | None = decoding
        self._on_end = on_end
        self.timings = Timings(arrival=arrival, tokens=decoding.request.timings.tokens)
        self.prompt_tokens = len(start)

    @property
    def entered(self) -> int:
        return self.prompt_tokens - self.reused

    @property
    def finish_reason(self) -> str | None:
        """ "stop" or "length"; None while the reply is in progress, and if it was closed early."""
        return self.tokens[-1].finish_reason if self.tokens else None

    def __next__(self) -> Token:
        if self._decoding is None:
            raise StopIteration
        try:
            token = next(self._decoding)
        except BaseException:
            self.close()
            raise
        self._tell(token.text, ended=token.finish_reason is not None)
        if token.finish_reason is not None:
            self._finish(self._decoding.kv, [])
        return token

    def close(self) -> None:
        """Stop. If no token has been made, the turn is dropped."""
        if self._decoding is None or self._start is None:
            return
        self._decoding.close()
        if self.tokens:
            self._tell("", ended=True)
        self._finish(self._start if self.tokens else None, [token.id for token in self.tokens])

    def _tell(self, text: str, ended: bool) -> None:
        thought, answer = self._parts(text, ended)
        self.thought += thought
        self.text += answer

    def _finish(self, kv: KVCache | None, due: list[int]) -> None:
        self._start = self._decoding = None
        self._on_end(self, kv, due)
