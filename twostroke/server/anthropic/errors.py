"""Errors as Anthropic's clients know them."""

from typing import Any

from twostroke.server.errors import ApiError
from twostroke.server.observability.logs import request_id

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object: the body of a response, or the last event of a stream."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return body | ({"request_id": name} if (name := request_id.get()) is not None else {})
