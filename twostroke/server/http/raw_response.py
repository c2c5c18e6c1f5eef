"""Responses as bytes, where no application serves: while loading, and before a request is whole."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json


def raw_response(
    status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, *, with_body: bool = True
) -> bytes:
    """An HTTP/1.1 response, after which the connection is closed; a HEAD is answered without body."""
    content = to_json(body)
    named = {**(headers or {}), "content-type": "application/json", "content-length": str(len(content))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}connection: close\r\n\r\n"
    return head.encode() + (content if with_body else b"")
