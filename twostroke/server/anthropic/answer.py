"""Anthropic's message, as a whole and as events of its blocks."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from twostroke.engine.output import Token
from twostroke.sampling.answer_reader import CallArguments, CallStart, Piece, PlainText, ThoughtText
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer, counted
from twostroke.server.error_responses import anthropic_body
from twostroke.server.errors import ApiError
from twostroke.server.tools.parser import ChoiceParser

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(Answer):
    """A message: blocks of thoughts, text and calls of tools, in the order in which they were written."""

    done_marker = False

    def __init__(self, model: str, active_call: ActiveCall) -> None:
        super().__init__("msg_", model, active_call, 1)
        self.parsers = [ChoiceParser(active_call.requests[0])]
        self._blocks: list[dict[str, Any]] = []
        self._reason: str | None = None
        self._stop: str | None = None

    def opening(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._message([], None)}
        yield {"type": "ping"}

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        for piece in self._read(prompt, token):
            begins = self._add(piece)
            index = len(self._blocks) - 1
            if begins:
                if index:
                    yield from self._stop_block(index - 1)
                yield self._start(index)
            if not isinstance(piece, CallStart):
                yield {"type": "content_block_delta", "index": index, "delta": _delta(piece)}

    def closing(self) -> Iterator[dict[str, Any]]:
        if not self._blocks:
            self._add(PlainText(""))
            yield self._start(0)
        yield from self._stop_block(len(self._blocks) - 1)
        ended = {"stop_reason": self._reason, "stop_sequence": self._stop}
        yield {"type": "message_delta", "delta": ended, "usage": self.usage(), **self._own_fields}
        yield {"type": "message_stop"}

    def add_token(self, prompt: int, token: Token) -> None:
        for piece in self._read(prompt, token):
            self._add(piece)

    def body(self) -> dict[str, Any]:
        if not self._blocks:
            self._add(PlainText(""))
        return (
            self._message([made for block in self._blocks if (made := _whole(block))], self._reason) | self._own_fields
        )

    @property
    def _own_fields(self) -> dict[str, Any]:
        return counted(self.active_call.requests[0]) | self.more

    def encode(self, event: dict[str, Any]) -> bytes:
        return f"event: {event['type']}\n".encode() + super().encode(event)

    def error_event(self, error: ApiError) -> dict[str, Any]:
        return anthropic_body(error)

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompt are those computed and those found in the prefix index; all are cached unasked."""
        said = super().usage()
        details = said["prompt_tokens_details"]
        cached = details["cached_tokens"]
        return {
            "input_tokens": said["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": said["completion_tokens"],
            "cached_tokens_by_tier": details["cached_tokens_by_tier"],
        }

    def _read(self, prompt: int, token: Token) -> list[Piece]:
        self.count(prompt, token)
        pieces, reason = self.parsers[0].read(token), self.parsers[0].reason(token)
        if reason is not None:
            self._stop = token.stop if reason == "stop" else None
            self._reason = "stop_sequence" if self._stop is not None else _REASONS.get(reason, "end_turn")
        return pieces

    def _add(self, piece: Piece) -> bool:
        """Add a piece to the blocks. Returns whether a block begins with it."""
        last = self._blocks[-1] if self._blocks else None
        match piece:
            case ThoughtText(text):
                if last is not None and last["type"] == "thinking":
                    last["thinking"] += text
                    return False
                self._blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case PlainText(text):
                if last is not None and last["type"] == "text":
                    last["text"] += text
                    return False
                self._blocks.append({"type": "text", "text": text})
            case CallStart(_, id, name):
                call = {"type": "tool_use", "id": f"toolu_{id.removeprefix('call_')}", "name": name, "input": ""}
                self._blocks.append(call)
            case CallArguments(_, text):
                assert last is not None, "arguments follow the start of a call"
                last["input"] += text
                return False
        return True

    def _start(self, index: int) -> dict[str, Any]:
        block = self._blocks[index]
        empty = {"text": {"text": ""}, "thinking": {"thinking": ""}}.get(block["type"], {"input": {}})
        return {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}

    def _stop_block(self, index: int) -> Iterator[dict[str, Any]]:
        block = self._blocks[index]
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": _signature(block["thinking"])}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _message(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": self._stop if reason is not None else None,
            "usage": self.usage(),
        }


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case ThoughtText(text):
            return {"type": "thinking_delta", "thinking": text}
        case PlainText(text):
            return {"type": "text_delta", "text": text}
        case CallArguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}
        case CallStart():
            raise AssertionError("the start of a call is no delta")


def _whole(block: dict[str, Any]) -> dict[str, Any] | None:
    """A block of a whole message. A call that was cut off has no input that could be given, so it is left out."""
    if block["type"] == "text":
        return block
    if block["type"] == "thinking":
        return {**block, "signature": _signature(block["thinking"])}
    try:
        return {**block, "input": json.loads(block["input"])}
    except ValueError:
        return None


def _signature(thought: str) -> str:
    """A digest. Clients send it back with the thought; the server believes the thought without it."""
    return hashlib.blake2b(thought.encode(errors="surrogatepass"), digest_size=16).hexdigest()
