"""OpenAI's responses: thoughts, messages and calls, as a whole or as typed events."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twostroke.engine.output import Token
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.answer_reader import CallArguments, CallStart, Piece, PlainText, ThoughtText
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer, logprob_entry, own_fields
from twostroke.server.errors import ApiError
from twostroke.server.openai.response_items import OfferedTool
from twostroke.server.openai.schemas.responses import ResponsesBody
from twostroke.server.tools.parser import ChoiceParser

Event = dict[str, Any]
_PLAIN = OfferedTool({})
# Fields of the body that the response repeats.
_ECHOED = (
    *("instructions", "previous_response_id", "store", "max_output_tokens", "max_tool_calls", "metadata", "tools"),
    *("tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_logprobs", "truncation"),
    *("prompt_cache_key", "safety_identifier", "user"),
)


class ResponsesAnswer(Answer):
    """A response: its output's items, in the order in which they were written."""

    done_marker = False

    def __init__(
        self,
        model: str,
        active_call: ActiveCall,
        body: ResponsesBody,
        tokenizer: Tokenizer,
        *,
        offers: Mapping[str, OfferedTool],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """`offers` are the tools by name; `keep` is given the whole response once it is complete."""
        super().__init__("resp_", model, active_call, 1)
        self._asked, self._tokenizer, self._offers, self._keep = body, tokenizer, offers, keep
        self.parsers = [ChoiceParser(active_call.requests[0])]
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item goes on
        self._reason: str | None = None
        self._entries: list[dict[str, Any]] = []  # log-probabilities whose text has not been sent
        self._number = 0

    def opening(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def events(self, prompt: int, token: Token) -> Iterator[Event]:
        self.count(prompt, token)
        self._reason = token.finish_reason
        if self._asked.wants_logprobs:
            self._entries.append(logprob_entry(self._tokenizer, token))
        for piece in self.parsers[0].read(token):
            yield from self._add(piece)

    def closing(self) -> Iterator[Event]:
        yield from self._end()
        response = self._response(self._status)
        self._keep(response)
        yield self._event(self._status, response=response)

    def add_token(self, prompt: int, token: Token) -> None:
        for _ in self.events(prompt, token):
            pass

    def body(self) -> dict[str, Any]:
        *_, last = self.closing()
        return last["response"]

    def encode(self, event: Event) -> bytes:
        return f"event: {event['type']}\n".encode() + super().encode(event)

    def error_event(self, error: ApiError) -> Event:
        facts = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response={**self._response("failed"), "error": facts})

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    # Items ------------------------------------------------------------------------------------------------------------

    def _add(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case ThoughtText(text):
                self._entries = []
                if not self._open or self._items[-1]["type"] != "reasoning":
                    item = {"id": f"rs_{secrets.token_hex(16)}", "type": "reasoning", "summary": []}
                    yield from self._begin_parts(item, {"type": "reasoning_text", "text": ""})
                self._items[-1]["content"][0]["text"] += text
                yield self._event("reasoning_text.delta", **self._at_part, delta=text)
            case PlainText(text):
                if not self._open or self._items[-1]["type"] != "message":
                    yield from self._begin_message()
                part = self._items[-1]["content"][0]
                part["text"] += text
                entries, self._entries = self._entries, []
                part["logprobs"] += entries
                yield self._event("output_text.delta", **self._at_part, delta=text, logprobs=entries)
            case CallStart(_, id, name):
                self._entries = []
                offer = self._offers.get(name, _PLAIN)
                item = {"type": "function_call", "id": f"fc_{secrets.token_hex(16)}", "arguments": ""}
                if offer.custom:
                    item = {"type": "custom_tool_call", "id": f"ctc_{secrets.token_hex(16)}", "input": ""}
                item |= {"status": "in_progress", "call_id": id, "name": name}
                yield from self._begin(item | ({"namespace": offer.namespace} if offer.namespace else {}))
            case CallArguments(_, text):
                self._entries = []
                item = self._items[-1]
                if item["type"] == "custom_tool_call":
                    item["input"] += text  # JSON until the call is complete
                else:
                    item["arguments"] += text
                    yield self._event("function_call_arguments.delta", **self._at_item, delta=text)

    def _begin_message(self) -> Iterator[Event]:
        item = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant"}
        yield from self._begin_parts(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _begin_parts(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
        yield from self._begin({**item, "status": "in_progress", "content": []})
        self._items[-1]["content"].append(part)
        yield self._event("content_part.added", **self._at_part, part=self._part)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._complete("completed")
        self._items.append(item)
        self._open = True
        yield self._event("output_item.added", output_index=self._last, item={**item})

    def _complete(self, status: str) -> Iterator[Event]:
        """End the item that is open, if any."""
        if not self._open:
            return
        self._open, item = False, self._items[-1]
        item["status"] = status
        match item["type"]:
            case "message":
                text, entries = item["content"][0]["text"], item["content"][0]["logprobs"]
                yield self._event("output_text.done", **self._at_part, text=text, logprobs=entries)
                yield self._event("content_part.done", **self._at_part, part=self._part)
            case "reasoning":
                yield self._event("reasoning_text.done", **self._at_part, text=self._part["text"])
                yield self._event("content_part.done", **self._at_part, part=self._part)
            case "function_call":
                facts = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("function_call_arguments.done", **self._at_item, **facts)
            case _:
                item["input"] = _freeform(item["input"])
                yield self._event("custom_tool_call_input.delta", **self._at_item, delta=item["input"])
                yield self._event("custom_tool_call_input.done", **self._at_item, input=item["input"])
        yield self._event("output_item.done", output_index=self._last, item={**item})

    def _end(self) -> Iterator[Event]:
        if not self._items:
            yield from self._begin_message()
        yield from self._complete(self._status)

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    @property
    def _at_item(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": self._last}

    @property
    def _at_part(self) -> dict[str, Any]:
        return {**self._at_item, "content_index": 0}

    @property
    def _part(self) -> dict[str, Any]:
        return {**self._items[-1]["content"][0]}

    # The response -----------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        body, done = self._asked, status in ("completed", "incomplete")
        wanted = body.text.format.model_dump(by_alias=True, exclude_unset=True) | {"type": body.text.format.type}
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.model,
            "output": self._items if done else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "background": False,
            "service_tier": "default",
            "text": {"format": wanted},
            "reasoning": body.reasoning.model_dump(exclude_unset=True)
            if "reasoning" in body.model_fields_set
            else None,
            "usage": self.usage() if done else None,
            "timings": None,
        } | ({**own_fields(self.active_call.requests[0]), **self.more} if done else {})
        return response | {name: getattr(body, name) for name in _ECHOED}


def _freeform(arguments: str) -> str:
    """The text that a custom tool was called with. Of a call that was cut off, what was written."""
    try:
        return json.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError):
        return arguments
