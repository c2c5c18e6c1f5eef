"""How an error is written for each API: a client reads its own API's error object and no other."""

from collections.abc import Callable
from typing import Any

from fastapi import Response

from twostroke.server.errors import ApiError
from twostroke.server.http.responses import json_response
from twostroke.server.observability.logs import request_id

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The body of a response, or the last event of a stream."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return body | ({"request_id": name} if (name := request_id.get()) is not None else {})


def ollama_body(error: ApiError) -> dict[str, Any]:
    """The body of a response, or the last line of a stream."""
    return {"error": error.message}


_BODIES: dict[str, Callable[[ApiError], dict[str, Any]]] = {"/v1/messages": anthropic_body, "/api/": ollama_body}


def error_response(path: str, error: ApiError) -> Response:
    """The response for a call of this path that ends with an error. OpenAI's form is that of every other path."""
    body = next((of for prefix, of in _BODIES.items() if path.startswith(prefix)), ApiError.body)
    return json_response(body(error), error.status, error.headers)
