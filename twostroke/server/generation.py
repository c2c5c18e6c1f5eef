"""What one HTTP request generates, as its handler sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable

from twostroke.engine.request import Request
from twostroke.server.engine_thread import EngineThread, Job, Update
from twostroke.server.errors import ApiError, DeadlineExceeded, from_engine


class Generation:
    """One engine request per prompt; their tokens in the order they are made. Lives on the event loop.

    Attributes:
        choices: the places it takes in the queue.
        jobs: one for each prompt.
    """

    def __init__(self, choices: int, on_close: Callable[["Generation"], None]) -> None:
        self.choices = choices
        self.jobs: list[Job] = []
        self._on_close = on_close
        self._thread: EngineThread | None = None
        self._arrived: asyncio.Queue[Update | ApiError] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def requests(self) -> list[Request]:
        return [job.request for job in self.jobs]

    def start(self, thread: EngineThread, requests: list[Request], timeout_s: float | None) -> None:
        """Hand the requests to the engine; they have so many seconds from now."""
        self._thread = thread
        self.jobs = [Job(request, self) for request in requests]
        for job in self.jobs:
            thread.submit(job)
        if timeout_s is not None:
            expired = DeadlineExceeded(timeout_s)
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self.abort, expired)

    def arrived(self, update: Update) -> None:
        self._arrived.put_nowait(update)

    def abort(self, reason: ApiError) -> None:
        """End it from outside: whoever reads it gets the reason, and the engine is told at once."""
        self._arrived.put_nowait(reason)
        self._cancel()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(which prompt, what is new) until all are done. Raises ApiError when one of them failed."""
        places = {job: place for place, job in enumerate(self.jobs)}
        while places:
            update = await self._arrived.get()
            if isinstance(update, ApiError):
                raise update
            if update.error is not None:
                raise from_engine(update.error)
            yield places[update.job], update
            if update.done:
                del places[update.job]

    def close(self) -> None:
        """Cancel what is not done, and give back the place in the queue. Once is enough; more does no harm."""
        if not self._closed:
            self._closed = True
            self._cancel()
            self._on_close(self)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for job in self.jobs:
            if not job.request.done and self._thread is not None:
                self._thread.cancel(job)
