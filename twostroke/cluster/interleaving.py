"""The tokens of several choices as one sequence, which can be taken apart again.

Dynamo's front end keeps the tokens of a request in the order in which they came, and not whose they are. So a worker
sends them in turn: one of each choice that has not ended. Where a choice ends follows from its tokens, so a worker that
takes over knows whose each of them is.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from twostroke.engine.output import ChoiceOutput, Token
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.draw import Sampled
from twostroke.sampling.params import SamplingParams


class ChoiceInterleaver:
    """Whose turn it is."""

    def __init__(self, choices: int) -> None:
        self.left = deque(range(choices))  # the choices that have not ended; the first is the next to send a token
        self._waiting = [deque[Token]() for _ in range(choices)]

    def push(self, token: Token) -> Iterator[Token]:
        """A token that is made. Yields those whose turn it is now."""
        self._waiting[token.choice].append(token)
        while self.left and (waiting := self._waiting[self.left[0]]):
            token = waiting.popleft()
            self.sent(ended=token.finish_reason is not None)
            yield token

    def rest(self) -> Iterator[Token]:
        """What was not sent, since the choice whose turn it was has ended without a last token."""
        for waiting in self._waiting:
            while waiting:
                yield waiting.popleft()

    def sent(self, ended: bool) -> None:
        """The choice whose turn it is has sent a token: its last one if it has `ended`."""
        choice = self.left.popleft()
        if not ended:
            self.left.append(choice)


def deinterleave(
    tokens: Sequence[int], params: SamplingParams, tokenizer: Tokenizer
) -> tuple[list[list[int]], ChoiceInterleaver]:
    """The tokens of each choice, from those that were sent in turn; and whose turn it is next.

    Raises InvalidRequest: there is a token after the last.
    """
    tracks = [ChoiceOutput(params, tokenizer, choice) for choice in range(params.n)]
    interleaver = ChoiceInterleaver(params.n)
    for id in tokens:
        if not interleaver.left:
            raise InvalidRequest("this answer has more tokens than its limits allow, so it cannot be continued")
        track = tracks[interleaver.left[0]]
        track.push(Sampled(id))
        interleaver.sent(ended=track.finish_reason is not None)
    return [track.ids for track in tracks], interleaver
