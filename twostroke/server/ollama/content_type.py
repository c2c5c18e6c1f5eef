"""Ollama's documentation calls it by curl without a content type, so that curl names that of a form."""

from starlette.types import ASGIApp, Receive, Scope, Send


class AnyContentType:
    """Reads the body of a call of Ollama's API as JSON, whatever its content type is.

    Not if a page of a browser sent it: a page of any site may send a form without asking, while for JSON the browser
    asks the server first (CORS). Browsers send the header `origin` with every call that has a body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/api/"):
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            if all(name != b"origin" for name, _ in headers):
                others = [(name, value) for name, value in headers if name != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        await self._app(scope, receive, send)
