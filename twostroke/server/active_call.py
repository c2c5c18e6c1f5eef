"""Everything in flight for one HTTP call."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

from twostroke.engine.engine_thread import Update
from twostroke.engine.request import Request
from twostroke.server.errors import ApiError, to_api_error
from twostroke.server.observability.tracing import CallTrace
from twostroke.server.served_engine import ServedEngine
from twostroke.server.tenants.tenant import current_tenant


@dataclass(frozen=True)
class CallOptions:
    """How a call is to be served, whatever API it came by."""

    choices: int  # places in the queue: prompts x choices of each
    stream: bool = False  # the answer is sent as it is made
    priority: int = 0  # lower is sooner
    timeout_s: float | None = None  # seconds until the deadline; None for the server's own


class ActiveCall:
    """One HTTP call: its place in the queue, its requests (one per prompt), and what the engine reports of them.

    Every method belongs to the event loop's thread.
    """

    def __init__(self, choices: int, on_close: Callable[["ActiveCall"], None]) -> None:
        self.choices = choices
        self.requests: list[Request] = []  # the engine's, once it has started
        self.trace = CallTrace()  # what the spans of its requests belong to
        self.abort_reason: ApiError | None = None  # why it was ended from outside, if it was
        self._on_close = on_close
        self._engine: ServedEngine | None = None
        self._reports: asyncio.Queue[Update | ApiError] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, engine: ServedEngine, requests: list[Request], timeout_s: float | None) -> None:
        """Hand the requests to the engine; their deadline is `timeout_s` seconds from now."""
        self._engine, self.requests = engine, requests
        tenant = current_tenant()
        for request in requests:
            request.cache_salt = request.cache_salt or tenant.salt(None)
            request.priority = max(request.priority, tenant.limits.priority)
            engine.submit(request, self)
        if timeout_s is not None:
            message = f"the request did not end within its timeout of {timeout_s:g} s"
            expired = ApiError(504, message, param="timeout", code="timeout")
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self.abort, expired)

    def report(self, update: Update) -> None:
        """Take what a step did for one of the requests."""
        self._reports.put_nowait(update)

    def abort(self, reason: ApiError) -> None:
        """End it from outside: `updates` raises the reason, and the engine cancels before its next step."""
        self.abort_reason = reason
        self._reports.put_nowait(reason)
        self._cancel()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(index of the prompt, what is new) until all are done. Raises ApiError when one of them failed."""
        indices = {request: index for index, request in enumerate(self.requests)}
        while indices:
            update = await self._reports.get()
            if isinstance(update, ApiError):
                raise update
            if update.error is not None:
                raise to_api_error(update.error)
            yield indices[update.request], update
            if update.done:
                del indices[update.request]

    def close(self) -> None:
        """Cancel what is not done, and give back the places in the queue. A second call does nothing."""
        if not self._closed:
            self._closed = True
            # Nobody reads it: it is for logs and spans (nginx's status 499).
            gone = ApiError(499, "the client closed the connection", code="client_closed_request")
            self.abort_reason = self.abort_reason or gone
            self._cancel()
            self._on_close(self)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for request in self.requests:
            if not request.done and self._engine is not None:
                self._engine.cancel(request)
