"""What /api/chat and /api/generate answer: one object, or one on each line of a stream."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

from twostroke.engine.output import Token
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.answer_reader import CallArguments, CallStart, PlainText, ThoughtText
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer, logprob_entry
from twostroke.server.error_responses import ollama_body
from twostroke.server.errors import ApiError
from twostroke.server.tools.parser import ChoiceParser


class OllamaAnswer(Answer):
    """The thought, the text, and the calls once each is complete: Ollama sends a call as a whole."""

    done_marker = False
    media_type = "application/x-ndjson"

    def __init__(
        self,
        model: str,
        active_call: ActiveCall,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        logprobs: bool,
        prompt: Sequence[int] | None = None,
    ) -> None:
        """`chat`: texts are messages, not responses to a prompt. `prompt`: its tokens, if `context` is given back."""
        super().__init__("", model, active_call, 1)
        self.operation = "chat" if chat else "text_completion"
        self.parsers = [ChoiceParser(active_call.requests[0])]
        self._tokenizer, self._chat, self._logprobs = tokenizer, chat, logprobs
        self._thought = self._text = ""
        self._calls: list[dict[str, Any]] = []
        self._sent = 0  # calls that a stream has sent
        self._entries: list[dict[str, Any]] = []
        self._reason = "stop"
        self._context = None if prompt is None else list(prompt)

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        before, thought, entries = len(self._text), len(self._thought), len(self._entries)
        self.add_token(prompt, token)
        text, thought, new = self._text[before:], self._thought[thought:], self._entries[entries:]
        calls = self._complete(token.finish_reason is not None)
        if thought or text or calls:
            yield self._object(thought, text, calls, new) | {"done": False}

    def closing(self) -> Iterator[dict[str, Any]]:
        yield self._object("", "", [], []) | self._end()

    def add_token(self, prompt: int, token: Token) -> None:
        self.count(prompt, token)
        for piece in self.parsers[0].read(token):
            match piece:
                case ThoughtText(text):
                    self._thought += text
                case PlainText(text):
                    self._text += text
                case CallStart(_, id, name):
                    self._calls.append({"id": id, "name": name, "arguments": ""})
                case CallArguments(index, text):
                    self._calls[index]["arguments"] += text
        if self._context is not None:
            self._context.append(token.id)
        if self._logprobs:
            self._entries.append(logprob_entry(self._tokenizer, token))
        if token.finish_reason is not None:
            self._reason = "length" if token.finish_reason == "length" else "stop"

    def body(self) -> dict[str, Any]:
        return self._object(self._thought, self._text, self._complete(ended=True), self._entries) | self._end()

    def encode(self, event: dict[str, Any]) -> bytes:
        return to_json(event, inf_nan_mode="null") + b"\n"

    def error_event(self, error: ApiError) -> dict[str, Any]:
        return ollama_body(error)

    def _complete(self, ended: bool) -> list[dict[str, Any]]:
        """The calls that are complete and were not returned yet. One that was cut off has no arguments: left out."""
        ready = self._calls[self._sent : len(self._calls) if ended else max(self._sent, len(self._calls) - 1)]
        self._sent += len(ready)
        made: list[dict[str, Any]] = []
        for index, call in enumerate(ready, self._sent - len(ready)):
            try:
                arguments = json.loads(call["arguments"])
            except ValueError:
                continue
            function = {"index": index, "name": call["name"], "arguments": arguments}
            made.append({"id": call["id"], "function": function})
        return made

    def _object(
        self, thought: str, text: str, calls: list[dict[str, Any]], entries: list[dict[str, Any]]
    ) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        made: dict[str, Any] = {"model": self.model, "created_at": now}
        thinking = {"thinking": thought} if thought else {}
        if self._chat:
            message = {"role": "assistant", "content": text} | thinking
            made["message"] = message | ({"tool_calls": calls} if calls else {})
        else:
            made |= {"response": text} | thinking
        return made | ({"logprobs": entries} if entries else {})

    def _end(self) -> dict[str, Any]:
        """Why it ended, and durations in nanoseconds. The model is loaded already."""
        request = self.active_call.requests[0]
        times = request.timings
        first, last = (times.tokens[0], times.tokens[-1]) if times.tokens else (times.arrival, times.arrival)
        start = times.scheduled or times.arrival
        return {
            "done": True,
            "done_reason": self._reason,
            **({} if self._context is None else {"context": self._context}),
            **self.more,
            "total_duration": nanoseconds(last - times.arrival),
            "load_duration": 0,
            "prompt_eval_count": request.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - start),
            "cached_tokens_by_tier": self.cached_by_tier(),
            "eval_count": self.output_tokens,
            "eval_duration": nanoseconds(last - first),
        }


def nanoseconds(seconds: float) -> int:
    """A duration as Ollama writes it."""
    return max(0, round(seconds * 1e9))
