"""A completion as llama.cpp writes it: one object, or one event for each piece of text and a last one."""

from collections.abc import Iterator
from typing import Any

from twostroke.engine.output import Token
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer, own_fields, timings


class LlamaCppAnswer(Answer):
    """One choice of one prompt."""

    operation = "text_completion"
    done_marker = False

    def __init__(self, model: str, active_call: ActiveCall) -> None:
        super().__init__("", model, active_call, 1)
        self._text, self._stop_type, self._stop = "", "limit", ""

    def events(self, prompt: int, token: Token) -> Iterator[dict[str, Any]]:
        self.add_token(prompt, token)
        if token.text:
            yield {"index": 0, "content": token.text, "tokens": [token.id], "stop": False, **self._counts()}

    def closing(self) -> Iterator[dict[str, Any]]:
        yield self._object("")

    def add_token(self, prompt: int, token: Token) -> None:
        self.count(prompt, token)
        self._text += token.text
        if token.finish_reason is not None:
            self._stop = token.stop or ""
            self._stop_type = "word" if token.stop else "limit" if token.finish_reason == "length" else "eos"

    def body(self) -> dict[str, Any]:
        return self._object(self._text)

    def _counts(self) -> dict[str, Any]:
        evaluated = self.active_call.requests[0].prompt_tokens
        return {"id_slot": -1, "tokens_predicted": self.output_tokens, "tokens_evaluated": evaluated}

    def _object(self, text: str) -> dict[str, Any]:
        request = self.active_call.requests[0]
        cached = sum(self.cached_by_tier().values())
        made = {
            "index": 0,
            "content": text,
            "tokens": [],
            "stop": True,
            "model": self.model,
            **self._counts(),
            "tokens_cached": request.prompt_tokens + self.output_tokens,
            "has_new_line": "\n" in self._text,
            "truncated": False,
            "stop_type": self._stop_type,
            "stopping_word": self._stop,
            **self.more,
            **own_fields(request),
        }
        ours = timings(request)
        prompt_ms, predicted_ms = ours["prefill_ms"] or 0.0, ours["decode_ms"] or 0.0
        made["timings"] = {
            **ours,
            "cache_n": cached,
            "prompt_n": request.prompt_tokens - cached,
            "prompt_ms": prompt_ms,
            "prompt_per_second": _per_second(request.prompt_tokens - cached, prompt_ms),
            "predicted_n": self.output_tokens,
            "predicted_ms": predicted_ms,
            "predicted_per_second": _per_second(self.output_tokens, predicted_ms),
        }
        return made


def _per_second(tokens: int, ms: float) -> float:
    return round(tokens * 1e3 / ms, 3) if ms else 0.0
