"""What calls of a model give: tokens as they are made, and whole answers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from twostroke.api.scoring import PromptScores
from twostroke.engine.engine import Engine
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.timings import Timings
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache


class Decoding(Iterator[Token]):
    """Tokens as they are made. Several threads may take them; each token goes to one.

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
        """Stop early and free the pages."""
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
    """One choice of a completion. `text` excludes stop strings; `tokens` includes an ending token."""

    text: str
    tokens: list[Token]
    finish_reason: str | None


@dataclass(frozen=True)
class Completion:
    """A request's answer.

    Attributes:
        cached_by_tier: numbers of its prefills' tokens that were found, in "pool", "host", "disk" and "remote".
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
    def of(cls, request: Request, tokens: Iterable[Token]) -> Completion:
        """The answer that a request's tokens make."""
        by_choice: list[list[Token]] = [[] for _ in request.choices]
        for token in tokens:
            by_choice[token.choice].append(token)
        outputs = [
            Output("".join(token.text for token in tokens), tokens, choice.output.finish_reason)
            for choice, tokens in zip(request.choices, by_choice, strict=True)
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
        """Number of its prefills' tokens that were found, in any tier."""
        return sum(self.cached_by_tier.values())

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def tokens(self) -> list[Token]:
        return self.outputs[0].tokens

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason
