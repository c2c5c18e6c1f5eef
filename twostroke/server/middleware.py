"""Around every call: its id, the API key, the size of its body, and a line in the log."""

import hmac
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.server.errors import ApiError
from twostroke.server.logs import request_id
from twostroke.server.refusals import refused
from twostroke.server.settings import Settings
from twostroke.server.transport import warning_header

log = logging.getLogger(__name__)
OPEN = {"/health", "/health/ready", "/health/live", "/metrics", "/version"}  # for probes and scrapers, without a key


class Middleware:
    """Puts `facts` into the ASGI scope: handlers add to them, and they are logged."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket, which no route serves
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else f"req_{secrets.token_hex(12)}"
        facts: dict[str, Any] = {"method": scope["method"], "path": scope["path"]}
        scope["facts"] = facts
        token, started = request_id.set(name), time.perf_counter()

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                ids = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]  # OpenAI's name, Anthropic's
                message["headers"] = [*message.get("headers", ()), *ids, *warning_header(facts)]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await refused(scope["path"], refusal)(scope, receive, answered)
            else:
                await self._app(scope, self._limited(receive), answered)
        finally:
            facts["ms"] = round((time.perf_counter() - started) * 1e3, 1)
            log.info("request", extra={"facts": facts})
            request_id.reset(token)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        """The error for a call that is refused before its body is read."""
        key = self._settings.api_key
        if key is not None and path not in OPEN:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            given = (
                bearer if scheme.lower() == "bearer" else "",
                headers.get("x-api-key", ""),
            )  # the latter: Anthropic
            # A comparison in constant time: otherwise the key could be guessed one character at a time.
            if not any(hmac.compare_digest(one.strip().encode("latin-1"), key.encode()) for one in given):
                message = "the API key is missing or wrong: send it as a bearer token or as x-api-key"
                return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            # The body is not read, so the connection cannot be used again.
            return ApiError(413, self._too_long, code="body_too_large", headers={"connection": "close"})
        return None

    @property
    def _too_long(self) -> str:
        return f"the body is longer than {self._settings.max_body_bytes} bytes"

    def _limited(self, receive: Receive) -> Receive:
        """`receive` with a limit, for bodies without a content-length."""
        seen = 0

        async def receive_some() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._settings.max_body_bytes:
                raise HTTPException(413, self._too_long)
            return message

        return receive_some
