"""Which API an error is written for: a client reads its own API's error object and no other."""

from collections.abc import Callable
from typing import Any

from fastapi import Response

from twostroke.server.anthropic.errors import error_body as anthropic_body
from twostroke.server.errors import ApiError
from twostroke.server.http.responses import json_response
from twostroke.server.ollama.errors import error_body as ollama_body

_BODIES: dict[str, Callable[[ApiError], dict[str, Any]]] = {"/v1/messages": anthropic_body, "/api/": ollama_body}


def error_response(path: str, error: ApiError) -> Response:
    """The response for a call of this path that ends with an error. OpenAI's form is that of every other path."""
    body = next((of for prefix, of in _BODIES.items() if path.startswith(prefix)), ApiError.body)
    return json_response(body(error), error.status, error.headers)
