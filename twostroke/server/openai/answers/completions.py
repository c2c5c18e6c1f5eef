"""OpenAI's text completions."""

from collections.abc import Iterator
from typing import Any

from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.engine.track import Token
from twostroke.server.answer import Answer, logprob, timings
from twostroke.server.exchange import Exchange
from twostroke.server.openai.schemas.completions import CompletionBody


class CompletionAnswer(Answer):
    """One choice for each prompt and n."""

    def __init__(self, model: str, exchange: Exchange, body: CompletionBody, tokenizer: Tokenizer) -> None:
        super().__init__("cmpl-", model, exchange, body.n)
        self._logprobs, self._tokenizer = body.logprobs, tokenizer
        self._options = body.stream_options
        self._kept: dict[tuple[int, int], list[Token]] = {}
        self._lengths: dict[int, int] = {}  # characters of each choice so far

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        self.output_tokens += 1
        # A token without text is part of a character. It is sent only where clients count tokens.
        every_token = self._logprobs is not None or self._options.continuous_usage_stats
        if not token.text and token.finish_reason is None and not every_token:
            return
        chunk = self._object([self._choice(prompt, [token])])
        if self._options.include_usage or self._options.continuous_usage_stats:
            chunk["usage"] = self.usage() if self._options.continuous_usage_stats else None
        yield chunk

    def closing(self) -> Iterator[dict[str, Any]]:
        if self._options.include_usage:
            yield {**self._object([]), "usage": self.usage()}

    def keep(self, prompt: int, token: Token) -> None:
        self.output_tokens += 1
        self._kept.setdefault((prompt, token.choice), []).append(token)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(prompt, tokens) for (prompt, _), tokens in sorted(self._kept.items())]
        return {**self._object(choices), "usage": self.usage()}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, prompt: int, tokens: list[Token]) -> dict[str, Any]:
        index, last = self.choice_index(prompt, tokens[0]), tokens[-1]
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(token.text for token in tokens),
            "logprobs": None if self._logprobs is None else self._log_probabilities(index, tokens),
            "finish_reason": last.finish_reason,
        }
        if last.finish_reason is not None and last.choice == 0:
            choice["timings"] = timings(self.exchange.requests[prompt])
        return choice

    def _log_probabilities(self, index: int, tokens: list[Token]) -> dict[str, Any]:
        name, offsets = self._tokenizer.token_text, list[int]()
        for token in tokens:
            offsets.append(self._lengths.get(index, 0))
            self._lengths[index] = offsets[-1] + len(token.text)
        return {
            "tokens": [name(token.id) for token in tokens],
            "token_logprobs": [logprob(token.logprob) for token in tokens],
            "top_logprobs": [{name(id): logprob(value) for id, value in token.top_logprobs or ()} for token in tokens],
            "text_offset": offsets,
        }
