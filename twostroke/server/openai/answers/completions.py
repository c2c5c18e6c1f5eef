"""OpenAI's text completions, with the prompt in front of them where `echo` asks for it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.engine.output import Token
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer, logprob, own_fields, prompt_logprobs
from twostroke.server.openai.schemas.completions import CompletionBody

Alternatives = Iterable[tuple[int, float]]


@dataclass(frozen=True)
class Echo:
    """A prompt that is sent back: its text, its token ids, and how many of these have no text in it (BOS)."""

    text: str
    tokens: Sequence[int]
    added: int = 0


class CompletionAnswer(Answer):
    """One choice for each prompt and n."""

    operation = "text_completion"

    def __init__(
        self, model: str, active_call: ActiveCall, body: CompletionBody, tokenizer: Tokenizer, echoes: Sequence[Echo]
    ) -> None:
        """`echoes`: the prompts, if they are to be sent back; otherwise empty."""
        super().__init__("cmpl-", model, active_call, body.n)
        self._asked, self._logprobs, self._tokenizer = body, body.logprobs, tokenizer
        self._options, self._echoes = body.stream_options, echoes
        self._kept: dict[tuple[int, int], list[Token]] = {}
        self._begun: set[tuple[int, int]] = set()  # choices of a stream whose prompt has been sent
        self._offsets: dict[tuple[int, int], Offsets] = {}

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        yield from self._opened(prompt, token.choice)
        self.count(prompt, token)
        # A token without text is part of a character. It is sent only where clients count tokens.
        every_token = self._logprobs is not None or self._options.continuous_usage_stats
        if token.text or token.finish_reason is not None or every_token:
            yield self._chunk(self._choice(prompt, token.choice, [token], reason=token.finish_reason))

    def closing(self) -> Iterator[dict[str, Any]]:
        if self._asked.max_tokens == 0:  # no token has come
            for prompt in range(len(self.active_call.requests)):
                for choice in range(self.n):
                    yield from self._opened(prompt, choice)
                    yield self._chunk(self._choice(prompt, choice, [], reason="length"))
        if self.more:
            yield {**self._object([]), **self.more}
        if self._options.include_usage:
            yield {**self._object([]), "usage": self.usage()}

    def add_token(self, prompt: int, token: Token) -> None:
        self.count(prompt, token)
        self._kept.setdefault((prompt, token.choice), []).append(token)

    def body(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt in range(len(self.active_call.requests)):
            for choice in range(self.n):
                tokens = self._kept.get((prompt, choice), [])
                reason = tokens[-1].finish_reason if tokens else "length"
                choices.append(self._choice(prompt, choice, tokens, echo=bool(self._echoes), reason=reason))
        return {**self._object(choices), "usage": self.usage(), **self.more}

    def _opened(self, prompt: int, choice: int) -> Iterator[dict[str, Any]]:
        """The prompt, as the first chunk of a choice that is to begin with it."""
        if self._echoes and (prompt, choice) not in self._begun:
            self._begun.add((prompt, choice))
            yield self._chunk(self._choice(prompt, choice, [], echo=True, reason=None))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._object([choice])
        if self._options.include_usage or self._options.continuous_usage_stats:
            chunk["usage"] = self.usage() if self._options.continuous_usage_stats else None
        return chunk

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, prompt: int, index: int, tokens: Sequence[Token], *, echo: bool = False, reason: str | None
    ) -> dict[str, Any]:
        """Tokens of a choice, with its prompt before them if `echo`; `reason` is why it ends with them, if it does."""
        request = self.active_call.requests[prompt]
        made: dict[str, Any] = {
            "index": prompt * self.n + index,
            "text": (self._echoes[prompt].text if echo else "") + "".join(token.text for token in tokens),
            "logprobs": None if self._logprobs is None else self._log_probabilities(prompt, index, tokens, echo),
            "finish_reason": reason,
        }
        if not self._asked.stream:
            made |= prompt_logprobs(request, self._tokenizer, self._asked.prompt_logprobs)
        if reason is not None and index == 0:
            made |= own_fields(request)
        return made

    def _log_probabilities(self, prompt: int, index: int, tokens: Sequence[Token], echo: bool) -> dict[str, Any]:
        known = self._echoes[prompt] if self._echoes else Echo("", ())
        offsets = self._offsets.setdefault(
            (prompt, index), Offsets(self._tokenizer, known, self._asked.skip_special_tokens)
        )
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(id: int, own: float | None, top: Alternatives, offset: int) -> None:
            made["tokens"].append(self._name(id))
            made["token_logprobs"].append(None if own is None else logprob(own))
            made["top_logprobs"].append(None if own is None else self._top(id, own, top))
            made["text_offset"].append(offset)

        if echo:
            scores = self.active_call.requests[prompt].prompt_scores or ()
            for score, id, offset in zip(scores, known.tokens, offsets.of_prompt(), strict=True):
                own, top = (None, ()) if score is None else (score.logprob, score.top[: self._logprobs])
                add(id, own, top, offset)
        for token in tokens:
            add(token.id, token.logprob, token.top_logprobs or (), offsets.next(token.id))
        return made

    def _top(self, id: int, own: float, top: Alternatives) -> dict[str, float]:
        """The likeliest tokens by name, and the token itself, as OpenAI has it. Of equal names, the likeliest stays."""
        named: dict[str, float] = {}
        for one, value in (*top, (id, own)):
            named.setdefault(self._name(one), logprob(value))
        return named

    def _name(self, id: int) -> str:
        return f"token_id:{id}" if self._asked.return_tokens_as_token_ids else self._tokenizer.token_text(id)


class Offsets:
    """Where each token begins in a choice's text, in code points.

    It is the number of whole characters before the token, so a token that continues a character has the offset of that
    character. What a stop string holds back or cuts off does not matter.
    """

    def __init__(self, tokenizer: Tokenizer, known: Echo, skip_special: bool = True) -> None:
        """`skip_special`: special tokens of the answer have no text."""
        self._tokenizer, self._known = tokenizer, known
        self._stream, self._length = tokenizer.stream(skip_special=skip_special), len(known.text)

    def of_prompt(self) -> list[int]:
        """The offsets of the prompt's tokens; a token that was added to the text is where the text begins."""
        stream, length, found = self._tokenizer.stream(skip_special=False), 0, [0] * self._known.added
        for id in self._known.tokens[self._known.added :]:
            found.append(min(length, len(self._known.text)))
            length += len(stream.push(id))
        return found

    def next(self, id: int) -> int:
        """The offset of the next token of the answer."""
        offset = self._length
        self._length += len(self._stream.push(id))
        return offset
