"""Error responses as bytes, where no application serves: while loading, and before a request is whole."""

from http import HTTPStatus

from pydantic_core import to_json

from twostroke.server.errors import ApiError


def raw_response(error: ApiError, *, with_body: bool = True) -> bytes:
    """An HTTP/1.1 response in OpenAI's form, after which the connection is closed; a HEAD is answered without body."""
    body = to_json(error.body())
    headers = {**error.headers, "content-type": "application/json", "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}connection: close\r\n\r\n"
    return head.encode() + (body if with_body else b"")
