"""OpenAI's responses: one message of text, as a whole or as typed events."""

import secrets
from collections.abc import Iterator
from typing import Any

from twostroke.engine.track import Token
from twostroke.server.answer import Answer, timings
from twostroke.server.errors import ApiError
from twostroke.server.exchange import Exchange
from twostroke.server.openai.schemas.responses import ResponsesBody


class ResponsesAnswer(Answer):
    """A response whose output is one message."""

    done_marker = False

    def __init__(self, model: str, exchange: Exchange, body: ResponsesBody) -> None:
        super().__init__("resp_", model, exchange, body.n)
        self._asked = body
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._text, self._reason = "", None
        self._number = 0

    def opening(self) -> Iterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress", []))
        yield self._event("output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("content_part.added", **self._where, part=self._part(""))

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        self.keep(prompt, token)
        if token.text:
            yield self._event("output_text.delta", **self._where, delta=token.text, logprobs=[])

    def closing(self) -> Iterator[dict[str, Any]]:
        part = self._part(self._text)
        yield self._event("output_text.done", **self._where, text=self._text, logprobs=[])
        yield self._event("content_part.done", **self._where, part=part)
        yield self._event("output_item.done", output_index=0, item=self._item(self._status, [part]))
        yield self._event(self._status, response=self.whole())

    def keep(self, prompt: int, token: Token) -> None:
        self.output_tokens += 1
        self._text += token.text
        self._reason = token.finish_reason

    def whole(self) -> dict[str, Any]:
        return self._response(self._status, [self._item(self._status, [self._part(self._text)])])

    def encode(self, event: dict[str, Any]) -> bytes:
        return f"event: {event['type']}\n".encode() + super().encode(event)

    def failed(self, error: ApiError) -> dict[str, Any]:
        return self._event("failed", response={**self._response("failed", []), "error": _error(error)})

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number - 1, **fields}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, done = self._asked, status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": "none",
            "tools": [],
            "text": {
                "format": body.text.format.model_dump(by_alias=True, exclude_unset=True)
                | {"type": body.text.format.type}
            },
            "usage": self.usage() if done else None,
            "timings": timings(self.exchange.requests[0]) if done else None,
        }


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": error.code or "server_error", "message": error.message}
