"""Around every call: its id, the API key, the reading of its body, and a line in the log."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.server.body_validation.supervisor import HUGE_BODY_BYTES, LONG_BODY_BYTES, HttpCall, Reply
from twostroke.server.error_responses import error_response
from twostroke.server.errors import ApiError
from twostroke.server.http.call_log import CallLog
from twostroke.server.http.origin_guard import OriginGuard
from twostroke.server.http.responses import CLIENT_CLOSED_REQUEST, ClientDisconnected, cancel_on_disconnect
from twostroke.server.http.surrogates import refuse_lone_surrogates
from twostroke.server.observability.logs import request_id
from twostroke.server.observability.tracing import capture_parent
from twostroke.server.settings import Settings
from twostroke.server.tenants.api_keys import ApiKeys
from twostroke.server.tenants.tenant import EVERYBODY, TenantCall, tenant_call

log = logging.getLogger(__name__)
PATHS_WITHOUT_KEY = {"/health", "/health/ready", "/health/live", "/metrics", "/version"}  # for probes and scrapers
MIN_BODY_RATE = 16 << 10  # bytes per second of a body, once its time is over
MAX_HUGE_BODIES = 8  # huge bodies in memory at once
# The response to send, or None for a call that the engine has to serve. Raises ApiError.
Validate = Callable[[HttpCall], Awaitable[Reply | None]]
_FORWARDED_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "root_path",
)


def needs_no_key(path: str, headers: Headers) -> bool:
    """Whether a call needs no key: probes, scrapers, and a browser that asks for the page, which holds no secret."""
    return (
        path in PATHS_WITHOUT_KEY
        or path.startswith("/page/")
        or (path == "/" and "text/html" in headers.get("accept", ""))
    )


class CallMiddleware:
    """Puts a `CallLog` into the ASGI scope: handlers add to it, and it is logged at the end."""

    def __init__(
        self,
        app: ASGIApp,  # serves the calls
        settings: Settings,  # limits of bodies
        keys: ApiKeys | None = None,  # those that are accepted; None for the settings' own
        validate: Validate | None = None,  # long bodies are validated by it first, in another process
        guard: OriginGuard | None = None,  # decides about calls where there is no key
        on_response: Callable[[int], None] = lambda status: None,  # is told the status of every response
    ) -> None:
        """Around `app`."""
        self._app, self._settings, self._validate = app, settings, validate
        self._keys = ApiKeys(settings.api_key, settings.api_key_file) if keys is None else keys
        self._guard, self._on_response = guard, on_response
        self._huge = asyncio.Semaphore(MAX_HUGE_BODIES)

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
        record = scope["call_log"] = CallLog(scope["method"], scope["path"])
        call = TenantCall(EVERYBODY)
        token, caller, started = request_id.set(name), tenant_call.set(call), time.perf_counter()
        capture_parent(headers)

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                ids = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]  # OpenAI's name, Anthropic's
                message["headers"] = [*message.get("headers", ()), *ids, *record.header, *call.headers]
            await send(message)

        try:
            call = self._admitted(scope, headers)
            record.key = call.tenant.name or None
            tenant_call.set(call)
            if scope["method"] == "POST":
                call.begin()
            await self._call(scope, receive, answered)
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, answered)
        except ClientDisconnected:
            record.client = "gone"
        except Exception:
            record.status = record.status or 500  # the application around this one answers so
            raise
        finally:
            call.end(record.requests)
            tenant_call.reset(caller)
            record.ms = round((time.perf_counter() - started) * 1e3, 1)
            self._on_response(record.status or CLIENT_CLOSED_REQUEST)
            log.log(_level(record), "request", extra={"fields": record.fields})
            request_id.reset(token)

    def _admitted(self, scope: Scope, headers: Headers) -> TenantCall:
        """Whose call it is. Raises ApiError for one that is refused before its body is read."""
        tenant = EVERYBODY
        if not self._keys.required:
            guarded = None if self._guard is None else self._guard.refusal(scope["method"], scope["path"], headers)
            if guarded is not None:
                raise guarded
        elif not needs_no_key(scope["path"], headers):
            found = self._keys.find(headers)
            if found is None:
                message = "the API key is missing or wrong: send it as a bearer token or as x-api-key"
                raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            tenant = found
        if "transfer-encoding" in headers and "content-length" in headers:  # RFC 9112, 6.1: it may be smuggled
            message = "the body has both a Content-Length and a Transfer-Encoding: send one of them"
            raise ApiError(400, message, code="ambiguous_length", headers={"connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise self._too_long
        return TenantCall(tenant)

    @property
    def _too_long(self) -> ApiError:
        # The rest of the body is not read, so the connection cannot be used again.
        message = f"the body is longer than {self._settings.max_body_bytes} bytes"
        return ApiError(413, message, code="body_too_large", headers={"connection": "close"})

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body, have a long one tried out, and call the application."""
        body = bytearray()
        async with AsyncExitStack() as memory:
            await self._read(receive, body, memory)
            whole = bytes(body)
            del body
            if len(whole) <= LONG_BODY_BYTES or self._validate is None:
                refuse_lone_surrogates(whole)  # of a long body, the worker does it
            if self._validate is not None and len(whole) > LONG_BODY_BYTES:
                sent = {key: scope[key] for key in _FORWARDED_SCOPE if key in scope}
                call = HttpCall(sent, whole)
                reply = await cancel_on_disconnect(receive, self._validate(call))
                if reply is not None:
                    for message in reply:
                        await send(message)
                    return
        messages: list[Message] = [{"type": "http.request", "body": whole, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replayed, send)

    async def _read(self, receive: Receive, body: bytearray, memory: AsyncExitStack) -> None:
        """Read a body. Raises ApiError if it is too long or too slow, ClientDisconnected if it does not come.

        A huge body waits, unread, until others have gone: at most `MAX_HUGE_BODIES` are in memory.
        """
        held, began, loop = False, 0.0, asyncio.get_running_loop()
        began = loop.time()
        while True:
            patience = self._settings.body_timeout_s + len(body) / MIN_BODY_RATE
            try:
                async with asyncio.timeout_at(began + patience):
                    message = await receive()
            except TimeoutError:
                message = f"the body did not come in time: {len(body)} bytes in {patience:.0f} s"
                raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body += message.get("body", b"")
            if len(body) > self._settings.max_body_bytes:
                raise self._too_long
            if not message.get("more_body", False):
                return
            if len(body) > HUGE_BODY_BYTES and not held:
                waited = loop.time()
                await memory.enter_async_context(self._huge)
                held, began = True, began + loop.time() - waited


def _level(record: CallLog) -> int:
    """Probes come every few seconds, so their lines are for debugging."""
    return logging.DEBUG if record.path.startswith("/health") else logging.INFO
