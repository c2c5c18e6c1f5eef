"""The engine's work as server-sent events, encoded once for all watchers.

The engine leaves step records and snapshots (`server/page/step_recorder.py`). While somebody watches, a task on the
event loop takes them a few times a second and appends them to a ring of messages. Each watcher sends what is new to
it. The engine waits for no watcher: one that is too slow misses messages that have left the ring.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from pydantic_core import to_json

from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError
from twostroke.server.page.step_recorder import StepRecord
from twostroke.server.page.watching import Seen, end_watch, pools_of, take_look, watch

log = logging.getLogger(__name__)

TICK_S = 0.25  # between two messages while the engine works
IDLE_S = 4.0  # between two messages while the engine is idle
SETTLE_S = 2.5  # after its last step, messages go on as before, until no rate that a watcher shows is above 0
RING_SIZE = 32  # messages


class EngineFeed:
    """The messages about one engine, or one replica of it. Call its methods from the event loop's thread only."""

    def __init__(self, engine: AsyncEngine, replica: int = 0) -> None:
        self._engine, self._replica = engine, replica
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING_SIZE)
        self._last = 0  # number of the newest message
        self._snapshot = b""  # the newest
        self._pools: list[dict[str, int]] = []
        self._news = asyncio.Event()  # set and replaced with every message

    async def messages(self) -> AsyncGenerator[bytes]:
        """Events until the server stops. A reader that comes late or is slow skips what has left the ring."""
        self._watchers += 1
        if not self._running:
            self._task = asyncio.create_task(self._run())
        try:
            if not self._pools:
                self._pools = await self._engine.beside_steps(pools_of, self._replica)
            yield event("hello", self._hello()) + self._snapshot
            seen = 0
            while self._running:
                news = self._news
                fresh = [data for number, data in self._ring if number > seen]
                seen = self._last
                if fresh:
                    yield b"".join(fresh)
                else:
                    await news.wait()
        finally:
            self._watchers -= 1

    @property
    def _running(self) -> bool:
        return self._task is not None

    def _hello(self) -> dict[str, Any]:
        """The first message: facts that do not change while the server runs."""
        itl_ms = self._engine.llm.engine.config.itl_ms
        of = {"replica": self._replica, "replicas": len(self._engine.served.parts)}
        return {"fields": StepRecord._fields, "pools": self._pools, "itl_ms": itl_ms, **of}

    async def _run(self) -> None:
        engine = self._engine
        counts: dict[str, int] = {}
        changed = True  # since the last snapshot
        quiet = silent = 0.0  # seconds since there was news, and since there was a message
        look: asyncio.Task[None] | None = None
        try:
            while self._watchers and engine.served.parts[self._replica].alive and not engine.draining:
                seen = await self._seen()
                before, counts = counts, seen.counts or counts
                news = bool(seen.steps) or counts != before  # a choice that is cancelled makes no step
                changed, quiet = changed or news, 0.0 if news else quiet + TICK_S
                if not seen.steps and seen.pages is None and (changed or silent >= IDLE_S):
                    if look is None or look.done():
                        look = asyncio.create_task(self._look())
                    await asyncio.wait([look], timeout=TICK_S)  # a step may take long
                    seen = await self._seen()
                    changed = seen.pages is None
                if seen.steps or seen.pages is not None or quiet < SETTLE_S or silent >= IDLE_S:
                    self._publish(seen.steps, seen.pages, counts)
                    silent = 0.0
                silent += TICK_S
                await asyncio.sleep(TICK_S)
        except Exception:
            log.exception("the feed failed")
        finally:
            self._task = None
            self._ring.clear()
            self._wake()
            with suppress(ApiError):
                await engine.beside_steps(end_watch, self._replica)

    async def _seen(self) -> Seen:
        try:
            return await self._engine.beside_steps(watch, self._replica)
        except ApiError:  # the engine's process is started again
            return Seen([], None, {})

    async def _look(self) -> None:
        """Leave a snapshot in the recorder, between two steps."""
        with suppress(ApiError):  # the engine has stopped
            await self._engine.between_steps(take_look, self._replica)

    def _publish(self, steps: list[StepRecord], pages: bytes | None, counts: dict[str, int]) -> None:
        at, tokens = asyncio.get_running_loop().time(), self._engine.output_tokens
        data = event("steps", {"steps": steps, "tokens": tokens, "at": at, **counts})
        if pages is not None:
            self._snapshot = event_of("pages", pages)
            data += self._snapshot
        self._last += 1
        self._ring.append((self._last, data))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def event(name: str, data: Any) -> bytes:
    """Encode a server-sent event."""
    return event_of(name, to_json(data))


def event_of(name: str, data: bytes) -> bytes:
    """The same for data that is JSON."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
