"""What the engine does, as server-sent events, written once for all who watch.

The engine leaves records and pictures (`engine/watch.py`). While somebody watches, a task on the event loop takes
them, a few times a second, and writes them into a ring of messages. Each watcher sends what is in the ring and is new
to it. So the engine waits for no watcher: one that is too slow misses what has left the ring.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from pydantic_core import to_json

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.engine.engine import Engine
from twostroke.engine.picture import Picture
from twostroke.engine.watch import StepRecord, Watch
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError

log = logging.getLogger(__name__)

TICK_S = 0.25  # between two messages
IDLE_S = 4.0  # between two messages while the engine rests
RING = 32  # messages
MOST_SPANS = 4096  # of the caches that one message draws


class Feed:
    """The messages of one engine. Every method belongs to the event loop's thread."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING)
        self._last = 0  # number of the newest message
        self._picture = b""  # the newest
        self._news = asyncio.Event()  # set and replaced with every message

    async def messages(self) -> AsyncGenerator[bytes]:
        """Events until the server stops. A reader that comes late or is slow skips what has left the ring."""
        self._watchers += 1
        if not self._running:
            self._task = asyncio.create_task(self._run())
        try:
            yield event("hello", self._facts()) + self._picture
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

    def _facts(self) -> dict[str, Any]:
        """What does not change while the server runs."""
        engine = self._engine.llm.engine
        pools = [
            {"pages": pool.num_pages, "page_size": pool.page_size, "entry_bytes": pool.entry_bytes}
            for pool in dict.fromkeys(model.pool for model in engine.models.values())
        ]
        return {"fields": StepRecord._fields, "pools": pools, "itl_ms": engine.config.itl_ms}

    async def _run(self) -> None:
        engine, watch = self._engine, Watch()
        engine.llm.engine.watch = watch
        idle, settled = IDLE_S, False
        try:
            while self._watchers and engine.alive and not engine.draining:
                steps, picture = watch.take()
                if not steps and (idle >= IDLE_S or not settled):  # what the last step left behind
                    picture = await self._look(watch)
                    settled = True
                if steps or picture is not None:
                    self._publish(steps, picture)
                idle, settled = (0.0, False) if steps or idle >= IDLE_S else (idle + TICK_S, settled)
                await asyncio.sleep(TICK_S)
        except ApiError:  # the engine has stopped
            return
        except Exception:
            log.exception("the feed failed")
        finally:
            engine.llm.engine.watch = None
            self._task = None
            self._ring.clear()
            self._wake()

    async def _look(self, watch: Watch) -> Picture | None:
        def look(engine: Engine) -> None:
            watch.look(engine)

        await self._engine.between_steps(look)
        return watch.take()[1]

    def _publish(self, steps: list[StepRecord], picture: Picture | None) -> None:
        tokens = self._engine.output_tokens
        data = event("steps", {"steps": steps, "tokens": tokens})
        if picture is not None:
            self._picture = event("pages", drawn(picture))
            data += self._picture
        self._last += 1
        self._ring.append((self._last, data))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def event(name: str, data: Any) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(data) + b"\n\n"


def drawn(picture: Picture) -> dict[str, Any]:
    """A picture as the page draws it: cells as runs, and where the entries of named requests are.

    `pools[i].runs` are pairs of a number of frames and what they hold (`engine/picture.py`). A lane's `spans` are
    four numbers for each page of it: its frame, its first and its last slot + 1, the position of its first entry.
    """
    pools = [
        {"roles": pool.roles, "runs": runs(pool.cells(picture.lanes)), "arriving": len(pool.arriving)}
        for pool in picture.pools
    ]
    where, left = {id(pool.pool): pool for pool in picture.pools}, MOST_SPANS
    lanes: list[dict[str, Any]] = []
    for lane in picture.lanes:
        facts: dict[str, Any] = {"owner": lane.owner, "model": lane.model, "decodes": lane.decodes}
        facts |= {"entries": lane.entries, "pages": len(lane.table), "pool": list(where).index(id(lane.pool))}
        if picture.owners[lane.owner][0] and len(lane.table) <= left:
            left -= len(lane.table)
            table = lane.table[:, [PAGE, START, STOP, POSITION]]
            table[:, 0] = where[id(lane.pool)].placed(table[:, 0])
            facts["spans"] = table.ravel().tolist()
        lanes.append(facts)
    return {"pools": pools, "owners": picture.owners, "lanes": lanes, "tiers": picture.tiers}


def runs(cells: np.ndarray) -> list[int]:
    """[count, value, count, value, ...] of equal neighbours."""
    if not len(cells):
        return []
    stops = np.append(np.flatnonzero(cells[1:] != cells[:-1]) + 1, len(cells))
    counts = np.diff(stops, prepend=0)
    return np.stack([counts, cells[stops - 1]], axis=1).ravel().tolist()
