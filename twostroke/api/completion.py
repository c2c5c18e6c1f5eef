"""What a model answers: tokens as they are made, and whole completions."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from twostroke.api.reasoning.reasoning import set_apart
from twostroke.api.scoring import PromptScores
from twostroke.engine.engine import Engine
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.timings import Timings
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache


class Decoding(Iterator[Token]):
    """An iterator of tokens as they are made. Several threads may take them; each token goes to one.

    Iterating raises the request's error (see `LLM.decode` and `LLM.stream`) after the tokens made before it. An
    iterator that is dropped ends its request.

    Attributes:
        request: the request, with its timings.
        tokens: the tokens taken so far.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.tokens: list[Token] = []
        self._engine, self._iterator = engine, engine.tokens(request)
        self._taking = threading.Lock()

    def __next__(self) -> Token:
        with self._taking:
            token = next(self._iterator)
            self.tokens.append(token)
            return token

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.drop(self.request)

    def close(self) -> None:
        """End the request early and free its pages. What was made before can still be taken."""
        self._engine.cancel(self.request)  # closing an iterator that has not started would not

    @property
    def text(self) -> str:
        """The first choice's text so far."""
        return "".join(token.text for token in self.tokens if token.choice == 0)

    @property
    def kv(self) -> KVCache:
        """The continued value, after the last token of `LLM.decode`. Raises InvalidRequest before that."""
        if (run := self.request.result) is None:
            raise InvalidRequest("there is no value yet: take all tokens first; only LLM.decode gives one")
        return run.kv


@dataclass(frozen=True)
class Output:
    """One choice of a completion.

    Attributes:
        text: its text, without stop strings and special tokens.
        thought: what the model thought before it, where `chat` or a server has set that apart; else "".
        tokens: its tokens, with the one that ended it.
        finish_reason: "stop" (an ending token or a stop string), "length" (`max_tokens`, or no room for more), or None
            if the request was cancelled.
    """

    text: str
    tokens: list[Token]
    finish_reason: str | None
    thought: str = ""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        outputs: its choices, as many as `SamplingParams.n`.
        prompt_tokens: number of tokens of the prompt.
        cached_by_tier: number of tokens of its prefills that were found, by tier: "pool", "host", "disk" and "remote".
        timings: when it was submitted, scheduled and finished, and when each token was made.
        facts: the technique's report on the first choice (`Refreshes`, `Speculation`), or None.
        prompt_scores: with `prompt_logprobs`, a `TokenScore` for each token of the prompt, None for the first; or None.
    """

    outputs: list[Output]
    prompt_tokens: int
    cached_by_tier: dict[str, int]
    timings: Timings
    facts: Any = None
    prompt_scores: PromptScores | None = None

    @classmethod
    def of(cls, request: Request, tokens: Iterable[Token]) -> "Completion":
        """The completion of a request that is done and has made `tokens`."""
        by_choice: list[list[Token]] = [[] for _ in request.choices]
        for token in tokens:
            by_choice[token.choice].append(token)
        outputs = [
            Output(text, tokens, choice.output.finish_reason, thought)
            for choice, tokens in zip(request.choices, by_choice, strict=True)
            for thought, text in [set_apart("".join(token.text for token in tokens), request.params)]
        ]
        facts = (
            request.prompt_tokens,
            dict(request.cached_by_tier),
            request.timings,
            request.result,
            request.prompt_scores,
        )
        return cls(outputs, *facts)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of its prefills that were found in any tier, and not computed."""
        return sum(self.cached_by_tier.values())

    @property
    def text(self) -> str:
        """The text of the first choice, without stop strings and special tokens."""
        return self.outputs[0].text

    @property
    def thought(self) -> str:
        """The thought of the first choice, where it is set apart from the text; else ""."""
        return self.outputs[0].thought

    @property
    def tokens(self) -> list[Token]:
        """The tokens of the first choice, with the one that ended it."""
        return self.outputs[0].tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended: "stop", "length", or None if the request was cancelled."""
        return self.outputs[0].finish_reason
