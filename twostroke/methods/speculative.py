"""Speculative decoding: cheap guesses, judged by the model several at a time.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192); Chen et al. 2023
(arXiv:2302.01318). Prompt lookup: Saxena 2023. What is emitted is what the model says, with its log-probabilities;
guesses only change how many tokens of it a step yields. A guess is accepted if it is the token sampled, so at any
temperature the answer is the plain request's, token by token; a draft guesses with the noise of the tokens that it
guesses (`sampling/draw.py`), and so mostly what the model will say (Daliri et al. 2025, arXiv:2408.07978).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.engine.options import GUESSER
from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled, Program
from twostroke.fields import flag, integer, text
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.methods.method import Method, Prompt

MAX_GUESSES = 32  # guesses a round


@dataclass(frozen=True)
class Speculation:
    """Counts of a speculative answer: rounds, guessed tokens, accepted tokens."""

    rounds: int
    guessed: int
    accepted: int


@dataclass(frozen=True)
class Speculative(Method, name="speculative"):
    """In rounds: guess some tokens, then decode with the guesses.

    Attributes:
        draft: where guesses come from. "lookup": what followed the latest earlier occurrence of the last few tokens.
            "student": a student, on the model's own KV, so that it needs no prefill. "draft": the draft model, with
            its own KV. "mtp": the model's own head of multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437,
            section 2.2), with its own KV.
        guesses: tokens guessed in a round; the first one's if `adaptive`.
        adaptive: two more after a round in which all were accepted, else one less.
        ngram: the most tokens that a lookup compares.
        context: the most tokens of the prompt that the model's own head reads; no prefix hit covers them.
    """

    goes_on = True

    draft: str = text("lookup", choices=("lookup", "student", "draft", GUESSER))
    guesses: int = integer(4, least=1, most=MAX_GUESSES)
    adaptive: bool = flag(True)
    ngram: int = integer(3, least=1, most=16)
    context: int = integer(256, least=1, most=1 << 20)

    @property
    def companions(self) -> tuple[str, ...]:
        return () if self.draft == "lookup" else (self.draft,)

    def program(self, prompt: Prompt) -> Program:
        reads = min(len(prompt), self.context) if self.draft == GUESSER else 0
        made = yield Prefill(prompt, hidden=reads or None)
        kv, hidden = (made.kv, made.hidden) if isinstance(made, Prefilled) else (made, None)
        run: Decoded = yield Decode(kv, max_tokens=1)
        del made, kv  # they would keep the prompt's own pages
        known = [*prompt[len(prompt) - reads + 1 :], *run.tokens]  # what the head has not entered
        drafted: KVCache | None = None
        count, rounds, guessed, accepted = self.guesses, 0, 0, 0
        while run.finish_reason is None:
            if self.draft == "lookup":
                guesses = lookup([*run.kv.tokens, run.tokens[-1]], self.ngram, count)
            elif self.draft == GUESSER:
                head: KVCache = yield Prefill(known, drafted, model=GUESSER, inputs=hidden)
                draft: Decoded = yield Decode(head, model=GUESSER, max_tokens=count, emit=False)
                drafted, guesses = head, draft.tokens
                del head, draft
            else:
                draft = yield (yield from self.drafting(run, drafted, count))
                drafted, guesses = draft.kv, draft.tokens
            asked = len(guesses) + 1
            run = yield Decode(run.kv, guesses=guesses, max_tokens=asked, states=asked if reads else 0)
            known, hidden = run.tokens, None if run.states is None else run.states[-1]
            stood = common_prefix_length(run.tokens, guesses)
            rounds, guessed, accepted = rounds + 1, guessed + len(guesses), accepted + stood
            if self.adaptive and guesses:
                count = min(MAX_GUESSES, count + 2) if stood == len(guesses) else max(1, count - 1)
        return Speculation(rounds, guessed, accepted)

    def drafting(self, run: Decoded, drafted: KVCache | None, count: int) -> Program:
        """The stroke that guesses what follows a run: behind its KV, or behind the draft's own of the same text."""
        kv = run.kv
        if self.draft == "draft":
            base = None if drafted is None else drafted[: len(kv)].with_tail(None)
            missing = [*kv[0 if base is None else len(base) :].tokens, run.tokens[-1]]
            kv = yield Prefill(missing, base, model="draft")
        return Decode(kv, model=self.draft, max_tokens=count, emit=False)


def lookup(tokens: Sequence[int], ngram: int, count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier occurrence of the last `ngram` tokens, or of fewer."""
    ids = np.array(tokens, np.int64)
    for n in range(min(ngram, len(ids) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)
        found = np.flatnonzero((windows == ids[-n:]).all(1))
        if len(found):
            start = int(found[-1]) + n
            return ids[start : start + count].tolist()
    return []
