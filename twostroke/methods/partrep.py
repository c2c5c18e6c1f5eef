"""PartRep: the prompt once, and its surprising tokens once more.

"PartRep" 2026 (arXiv:2607.01792): repetition helps where tokens are that the model did not expect. So only those of
high negative log-likelihood are appended again, in their order. The paper also reads the likelihood at an early layer
and leaves prompts alone that gain nothing; here the last layer's is taken, and every prompt is treated.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program
from twostroke.fields import number, text
from twostroke.methods.compress import surprises
from twostroke.methods.method import Method, Prompt


@dataclass(frozen=True)
class PartRep(Method, name="partrep"):
    """Prefill the prompt, then those of its tokens that surprised the model most, and decode from all.

    In a chat they are tokens of the last user's text and come right behind it, so the template stays whole. The prompt
    is scored, so the prefix index does not spare its prefill.
    """

    ratio: float = number(0.3, above=0, most=1)  # the share of the tokens that is appended
    between: str = text("\n")  # the text before them

    def program(self, prompt: Prompt) -> Program:
        turn = range(len(prompt)) if prompt.turn is None else prompt.turn
        made: Prefilled = yield Prefill(prompt[: turn.stop], logprobs=0, scored_from=turn.start)
        worth, kv = surprises(made), made.kv
        del made
        again = np.sort(np.argsort(-worth, kind="stable")[: round(self.ratio * len(turn))]) + turn.start
        more = [*prompt.encode(self.between), *(prompt[index] for index in again.tolist()), *prompt[turn.stop :]]
        yield Decode((yield Prefill(more, kv)))
