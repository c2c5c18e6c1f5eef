"""Errors as OpenAI's clients know them: a status, and an object with a message, a type, a field and a code."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.errors import (
    ContextLengthExceeded,
    EndsEngine,
    EngineFailed,
    EngineRestarting,
    EngineStopped,
    InvalidRequest,
    NotFinite,
    OutOfPages,
)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error as a client sees it.

    Attributes:
        status: the HTTP status.
        message: what is wrong and what to do.
        param: the field that is wrong, as `messages[0].content`.
        code: a name that programs can test for.
        headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: the body of a response, or the last event of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class ShuttingDown(ApiError):
    """The server accepts no new work; requests that outlast the grace time are cancelled."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})


def to_api_error(error: Exception) -> ApiError:
    """The error to send for an error that ended a request. Only errors raised on purpose show their message."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthExceeded):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return invalid(error)
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), code="engine_failed")
    if isinstance(error, EngineRestarting):
        return ApiError(503, str(error), code="engine_restarting", headers={"retry-after": "2"})
    if isinstance(error, EndsEngine):
        return ApiError(500, str(error), code="ends_engine")
    if isinstance(error, EngineStopped):
        return ShuttingDown()
    if isinstance(error, NotFinite):
        return ApiError(500, str(error), code="model_computes_nan")
    if isinstance(error, OutOfPages):
        return ApiError(400, f"the request does not fit into the KV cache: {error}", code="context_length_exceeded")
    return ApiError(500, "this request failed inside the server; other requests continue", code="internal_error")


def invalid(error: InvalidRequest, param: str | None = None) -> ApiError:
    """The error to send for InvalidRequest. Its message begins with the field's name where one is wrong."""
    named = re.match(r"([a-z_]+) must be ", str(error))
    return ApiError(400, str(error), param=param or (named[1] if named else None))


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The error to send for what pydantic found, about the first field that is wrong."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    param = field_path(first["loc"])
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    if param is None and first["type"] == "value_error":  # about several fields; the text begins with one's name
        named, _, rest = message.partition(": ")
        return ApiError(400, message, param=named if rest else None)
    if param is None:
        return ApiError(400, "the body must be a JSON object, sent with content-type application/json")
    return ApiError(400, f"{param}: {message}", param=param)


def field_path(location: Sequence[str | int]) -> str | None:
    """("body", "messages", 0, "role") as `messages[0].role`; None for the body itself."""
    path = ""
    for part in location[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None
