"""Errors as Ollama's clients know them."""

from typing import Any

from twostroke.server.errors import ApiError


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of a response, or the last line of a stream."""
    return {"error": error.message}
