"""The target of a request line, where it is a whole URL (absolute-form, RFC 9112, 3.2.2)."""

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class AbsoluteTargets:
    """Serves `GET http://host/path` as `GET /path` of that host: clients behind a proxy's setting send it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := _ABSOLUTE.match(scope["raw_path"])):
            path = scope["raw_path"][found.end() :] or b"/"
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {
                **scope,
                "path": unquote(path.decode("latin-1")),
                "raw_path": path,
                "headers": [(b"host", found[1]), *others],  # it replaces the header, says the RFC
            }
        await self._app(scope, receive, send)
