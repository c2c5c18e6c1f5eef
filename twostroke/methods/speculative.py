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
from twostroke.engine.strokes import Decode, Decoded, Guess, Guesses, Lookup, Prefill, Prefilled, Program
from twostroke.fields import flag, integer, text
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.methods.method import Method, Prompt

MAX_GUESSES = 32  # guesses a round


@dataclass(frozen=True)
class Speculation:
    """Counts of a speculative answer: rounds with guesses, guessed tokens, accepted tokens."""

    rounds: int
    guessed: int
    accepted: int


@dataclass(frozen=True)
class Speculative(Method, name="speculative"):
    """Guess some tokens, then decode with the guesses."""

    goes_on = True

    # where guesses come from. "lookup": what followed the last few tokens before, in this text or in another that this
    # technique has answered. "student": a student, on the model's own KV, so that it needs no prefill. "draft": the
    # draft model, with its own KV. "mtp": the model's own head of multi-token prediction (DeepSeek-AI 2024,
    # arXiv:2412.19437, section 2.2), with its own KV.
    draft: str = text("lookup", choices=("lookup", "student", "draft", GUESSER))
    guesses: int = integer(16, least=1, most=MAX_GUESSES)  # the most tokens guessed in a round
    # as many as pay, by how guesses fared and what a row of a step costs now (`engine/guess_judge.py`); else always the
    # most
    adaptive: bool = flag(True)
    # the most tokens of the prompt that the model's own head reads; no prefix hit covers them
    context: int = integer(256, least=1, most=1 << 20)

    @property
    def companions(self) -> tuple[str, ...]:
        return () if self.draft == "lookup" else (self.draft,)

    def program(self, prompt: Prompt) -> Program:
        if self.draft != "lookup":
            return (yield from self.drafted(prompt))
        kv = yield Prefill(prompt)
        run: Decoded = yield Decode(kv, lookup=Lookup(self.guesses, self.adaptive))
        guessed = sum(len(one.guesses) for one in run.rounds)
        return Speculation(len(run.rounds), guessed, sum(one.stood for one in run.rounds))

    def drafted(self, prompt: Prompt) -> Program:
        """In rounds: another model guesses some tokens, then the model decodes with the guesses."""
        reads = min(len(prompt), self.context) if self.draft == GUESSER else 0
        made = yield Prefill(prompt, hidden=reads or None)
        kv, hidden = (made.kv, made.hidden) if isinstance(made, Prefilled) else (made, None)
        run: Decoded = yield Decode(kv, max_tokens=1)
        del made, kv  # they would keep the prompt's own pages
        known = [*prompt[len(prompt) - reads + 1 :], *run.tokens]  # what the head has not entered
        drafted: KVCache | None = None
        rounds = guessed = accepted = stood = 0
        guesses: Sequence[int] = ()
        while run.finish_reason is None:
            unread = known if self.draft == GUESSER else self.unread(run, drafted)
            told: Guesses = yield Guess(self.draft, self.guesses, self.adaptive, unread, len(guesses), stood)
            guesses = ()
            if told.count and self.draft == GUESSER:
                head: KVCache = yield Prefill(known, drafted, model=GUESSER, inputs=hidden)
                draft: Decoded = yield Decode(head, model=GUESSER, max_tokens=told.count, emit=False)
                drafted, guesses, known, hidden = head, draft.tokens, [], None
                del head, draft
            elif told.count:
                draft = yield (yield from self.drafting(run, drafted, unread, told.count))
                drafted, guesses = draft.kv if self.draft == "draft" else None, draft.tokens
                del draft  # a student's would keep the last page of the model's own
            asked = len(guesses) + 1 if told.count else told.max_tokens
            run = yield Decode(run.kv, guesses=guesses, max_tokens=asked, states=asked or 0 if reads else 0)
            if run.states is not None:
                known = [*known, *run.tokens]
                hidden = run.states[-1] if hidden is None else np.concatenate([hidden, run.states[-1]])
            elif drafted is not None:
                drafted = drafted[: len(run.kv)].with_tail(None)  # without wrong guesses
            stood = common_prefix_length(run.tokens, guesses)
            rounds, guessed, accepted = rounds + bool(guesses), guessed + len(guesses), accepted + stood
        return Speculation(rounds, guessed, accepted)

    def unread(self, run: Decoded, drafted: KVCache | None) -> Sequence[int]:
        """What a draft must read before it guesses what follows a run: a student has the model's own KV."""
        if self.draft != "draft":
            return ()
        return [*run.kv[0 if drafted is None else len(drafted) :].tokens, run.tokens[-1]]

    def drafting(self, run: Decoded, drafted: KVCache | None, unread: Sequence[int], count: int) -> Program:
        """The stroke that guesses what follows a run: behind its KV, or behind the draft's own of the same text."""
        kv = (yield Prefill(unread, drafted, model="draft")) if unread else run.kv
        return Decode(kv, model=self.draft, max_tokens=count, emit=False)
