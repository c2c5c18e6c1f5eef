"""OpenAI's chat completions, with tool calls."""

from collections.abc import Iterator
from typing import Any

from twostroke.engine.output import Token
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.answer_reader import CallArguments, CallStart, Piece, PlainText, ThoughtText
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer, logprob_entry, own_fields, prompt_logprobs
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.tools.parser import ChoiceParser

_THOUGHT = ("reasoning_content", "reasoning")  # its names: DeepSeek's and vLLM's, and OpenRouter's


class ChatAnswer(Answer):
    """`n` messages."""

    def __init__(self, model: str, active_call: ActiveCall, body: ChatBody, tokenizer: Tokenizer) -> None:
        super().__init__("chatcmpl-", model, active_call, body.n)
        self._tokenizer, self._logprobs, self._options = tokenizer, body.logprobs, body.stream_options
        self._asked = body
        self.parsers = [ChoiceParser(active_call.requests[0]) for _ in range(body.n)]
        self._messages: list[dict[str, Any]] = [{"role": "assistant", "content": None} for _ in range(body.n)]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(body.n)]
        self._ids: list[list[int]] = [[] for _ in range(body.n)]
        self._reasons: list[str | None] = [None] * body.n

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(self.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    @property
    def message(self) -> dict[str, Any]:
        """The first message, of a stream if anything is called when it is complete."""
        return self._messages[0]

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        self.count(prompt, token)
        pieces = list(self.parsers[token.choice].read(token))
        if self.on_finish:
            for piece in pieces:
                _add(self._messages[token.choice], piece)
        deltas = [_delta(piece) for piece in pieces]
        logprobs = {"content": [logprob_entry(self._tokenizer, token)]} if self._logprobs else None
        if not deltas and (logprobs or token.finish_reason or self._asked.return_token_ids):
            deltas = [{}]
        for number, delta in enumerate(deltas, 1):
            last = number == len(deltas)
            reason = self.parsers[token.choice].reason(token) if last else None
            chunk = self._chunk(token.choice, delta, logprobs if number == 1 else None, reason)
            if self._asked.return_token_ids and number == 1:
                chunk["choices"][0]["token_ids"] = [token.id]
            yield chunk

    def closing(self) -> Iterator[dict[str, Any]]:
        if self.more:
            yield {**self._object("chat.completion.chunk", []), **self.more}
        if self._options.include_usage:
            yield {**self._object("chat.completion.chunk", []), "usage": self.usage()}

    def add_token(self, prompt: int, token: Token) -> None:
        self.count(prompt, token)
        message = self._messages[token.choice]
        for piece in self.parsers[token.choice].read(token):
            _add(message, piece)
        self._ids[token.choice].append(token.id)
        if self._logprobs:
            self._entries[token.choice].append(logprob_entry(self._tokenizer, token))
        self._reasons[token.choice] = self.parsers[token.choice].reason(token)

    def body(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, message in enumerate(self._messages):
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            logprobs = {"content": self._entries[index], "refusal": None} if self._logprobs else None
            choice: dict[str, Any] = {"index": index, "message": {**message, "refusal": None}, "logprobs": logprobs}
            if self._asked.return_token_ids:
                choice["token_ids"] = self._ids[index]
            choices.append({**choice, "finish_reason": self._reasons[index], **self._figures(index)})
        scores = prompt_logprobs(self.active_call.requests[0], self._tokenizer, self._asked.prompt_logprobs)
        return {**self._object("chat.completion", choices), "usage": self.usage(), **scores, **self.more}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice |= self._figures(index)
        chunk = self._object("chat.completion.chunk", [choice])
        if self._options.include_usage or self._options.continuous_usage_stats:
            chunk["usage"] = self.usage() if self._options.continuous_usage_stats else None
        return chunk

    def _figures(self, index: int) -> dict[str, Any]:
        return own_fields(self.active_call.requests[0]) if index == 0 else {}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _delta(piece: Piece) -> dict[str, Any]:
    """A piece as a stream's delta."""
    match piece:
        case ThoughtText(text):
            return dict.fromkeys(_THOUGHT, text)
        case PlainText(text):
            return {"content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _add(message: dict[str, Any], piece: Piece) -> None:
    """Add a piece to a message that is sent as a whole."""
    match piece:
        case ThoughtText(text):
            message.update(dict.fromkeys(_THOUGHT, message.get(_THOUGHT[0], "") + text))
        case PlainText(text):
            message["content"] = (message["content"] or "") + text
        case CallStart(_, id, name):
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            message.setdefault("tool_calls", []).append(call)
        case CallArguments(index, text):
            message["tool_calls"][index]["function"]["arguments"] += text
