"""Which paths there are, for a client that asks for another one or in another way; and HEAD wherever GET is."""

from collections.abc import Iterable, MutableMapping
from typing import Any

from fastapi import APIRouter
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.server.errors import ApiError


class RouteTable:
    """The paths of some routers."""

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._routes = [route for router in routers for route in router.routes if isinstance(route, Route)]

    def serves(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether a route takes the call."""
        return any(route.matches(scope)[0] == Match.FULL for route in self._routes)

    def not_found(self, scope: MutableMapping[str, Any]) -> ApiError:
        """The error for a call that no route takes: 405 with what is allowed there, or 404 with what there is."""
        method, path = scope["method"], scope["path"]
        if allowed := sorted(self._allowed(scope)):
            message = f"{path:.100} takes {' and '.join(allowed)}, not {method}"
            return ApiError(405, message, headers={"allow": ", ".join(allowed)})
        there = ", ".join(sorted({route.path for route in self._routes}))
        return ApiError(404, f"there is no {path:.100} here. There are: {there}", code="path_not_found")

    def _allowed(self, scope: MutableMapping[str, Any]) -> set[str]:
        methods: set[str] = set()
        for route in self._routes:
            if route.matches(scope)[0] != Match.NONE:
                methods |= route.methods or set()
        return methods | {"HEAD"} if "GET" in methods else methods


class HeadMiddleware:
    """Answers HEAD as GET is answered, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def bare(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, bare)
