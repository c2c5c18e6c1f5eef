"""A client of the cluster that notes what it is sent, and may do something in mid-stream."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError

PATIENCE_S = 90.0  # no request may hang longer


@dataclass
class Answer:
    """What a client has seen.

    Attributes:
        text, logprobs: of each choice.
        finish: reasons, by choice.
        error: what came instead of tokens, or after some of them; None.
    """

    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    error: str | None = None


def stream(url: str, at: int = 0, act: Callable[[str], None] | None = None, **body: Any) -> Answer:
    """A chat completion, token by token. After `at` chunks, `act` is called with the completion's id."""
    answer = Answer()
    for count, event in enumerate(_events(url, body), 1):
        if "choices" not in event:
            answer.error = json.dumps(event)
            return answer
        for choice in event["choices"]:
            index = choice["index"]
            answer.text[index] = answer.text.get(index, "") + (choice["delta"].get("content") or "")
            answer.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("content") or [])
            if choice.get("finish_reason"):
                answer.finish[index] = choice["finish_reason"]
        if count == at and act is not None:
            act(event["id"])
    return answer


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps({"stream": True} | body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as lines:
            for line in lines:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
    except HTTPError as error:
        yield {"status": error.code, "error": error.read().decode()}
