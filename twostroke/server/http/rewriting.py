"""Calls in forms that few clients send, rewritten before anything else sees them."""

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class RewrittenCalls:
    """Serves whole URLs as targets, and bodies of Ollama's API without the content type of JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = _as_json(_relative(scope))
        await self._app(scope, receive, send)


def _relative(scope: Scope) -> Scope:
    """`GET http://host/path` as `GET /path` of that host: clients behind a proxy's setting send it.

    It is the absolute-form of a request's target (RFC 9112, 3.2.2).
    """
    if (found := _ABSOLUTE.match(scope["raw_path"])) is None:
        return scope
    path = scope["raw_path"][found.end() :] or b"/"
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    # The host replaces the header, says the RFC.
    headers = [(b"host", found[1]), *others]
    return {**scope, "path": unquote(path.decode("latin-1")), "raw_path": path, "headers": headers}


def _as_json(scope: Scope) -> Scope:
    """A call of Ollama's API as one of JSON: its documentation calls by curl, which names the content type of a form.

    Not if a page of a browser sent it: a page of any site may send a form without asking, while for JSON the browser
    asks the server first (CORS). Browsers send the header `origin` with every call that has a body.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if not scope["path"].startswith("/api/") or any(name == b"origin" for name, _ in headers):
        return scope
    others = [(name, value) for name, value in headers if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}
