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

import numpy as np
from pydantic_core import to_json

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.kv import spans
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError
from twostroke.server.page.snapshot import EngineSnapshot
from twostroke.server.page.step_recorder import StepRecord, StepRecorder

log = logging.getLogger(__name__)

TICK_S = 0.25  # between two messages while the engine works
IDLE_S = 4.0  # between two messages while the engine is idle
SETTLE_S = 2.5  # after its last step, messages go on as before, until no rate that a watcher shows is above 0
RING_SIZE = 32  # messages
MAX_SPANS = 4096  # page spans that one message lists, of all lanes together


class EngineFeed:
    """The messages about one engine. Call its methods from the event loop's thread only."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING_SIZE)
        self._last = 0  # number of the newest message
        self._snapshot = b""  # the newest
        self._news = asyncio.Event()  # set and replaced with every message

    async def messages(self) -> AsyncGenerator[bytes]:
        """Events until the server stops. A reader that comes late or is slow skips what has left the ring."""
        self._watchers += 1
        if not self._running:
            self._task = asyncio.create_task(self._run())
        try:
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
        engine = self._engine.llm.engine
        pools = [
            {"pages": pool.num_pages, "page_size": pool.page_size}
            for pool in dict.fromkeys(model.pool for model in engine.models.values())
        ]
        return {"fields": StepRecord._fields, "pools": pools, "itl_ms": engine.config.itl_ms}

    async def _run(self) -> None:
        engine, watch = self._engine, StepRecorder()
        engine.llm.engine.observer = watch
        counts: dict[str, int] = {}
        changed = True  # since the last snapshot
        quiet = silent = 0.0  # seconds since there was news, and since there was a message
        look: asyncio.Task[None] | None = None
        try:
            while self._watchers and engine.alive and not engine.draining:
                steps, snapshot = watch.take()
                before, counts = counts, self._counts()
                news = bool(steps) or counts != before  # a choice that is cancelled makes no step
                changed, quiet = changed or news, 0.0 if news else quiet + TICK_S
                if not steps and snapshot is None and (changed or silent >= IDLE_S):
                    if look is None or look.done():
                        look = asyncio.create_task(self._look(watch))
                    await asyncio.wait([look], timeout=TICK_S)  # a step may take long
                    steps, snapshot = watch.take()
                    changed = snapshot is None
                if steps or snapshot is not None or quiet < SETTLE_S or silent >= IDLE_S:
                    self._publish(steps, snapshot, counts)
                    silent = 0.0
                silent += TICK_S
                await asyncio.sleep(TICK_S)
        except Exception:
            log.exception("the feed failed")
        finally:
            engine.llm.engine.observer = None
            self._task = None
            self._ring.clear()
            self._wake()

    async def _look(self, watch: StepRecorder) -> None:
        """Leave a snapshot in `watch`, between two steps."""
        with suppress(ApiError):  # the engine has stopped
            await self._engine.between_steps(watch.snapshot)

    def _counts(self) -> dict[str, int]:
        """Numbers that `/metrics` has too, read as it reads them."""
        engine = self._engine.llm.engine
        return {
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "arriving": engine.num_arriving,
            "preemptions": engine.preemptions,
            "evicted": engine.evicted_pages,
        }

    def _publish(self, steps: list[StepRecord], snapshot: EngineSnapshot | None, counts: dict[str, int]) -> None:
        at, tokens = asyncio.get_running_loop().time(), self._engine.output_tokens
        data = event("steps", {"steps": steps, "tokens": tokens, "at": at, **counts})
        if snapshot is not None:
            self._snapshot = event("pages", snapshot_data(snapshot))
            data += self._snapshot
        self._last += 1
        self._ring.append((self._last, data))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def event(name: str, data: Any) -> bytes:
    """Encode a server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(data) + b"\n\n"


def snapshot_data(snapshot: EngineSnapshot) -> dict[str, Any]:
    """A snapshot as the page draws it: cells as runs, and where the entries of named requests are.

    `pools[i].runs` are pairs of a number of frames and what they hold (`server/page/snapshot.py`). A lane's `spans` are
    four numbers for each of its pages in the first group of layers: the frame, the first and the last slot + 1, the
    position of the first entry.
    """
    pools = [
        {"roles": pool.roles, "runs": run_lengths(pool.cells(snapshot.lanes)), "arriving": len(pool.arriving)}
        for pool in snapshot.pools
    ]
    where, left = {id(pool.pool): pool for pool in snapshot.pools}, MAX_SPANS
    lanes: list[dict[str, Any]] = []
    for lane in snapshot.lanes:
        facts: dict[str, Any] = {"owner": lane.owner, "model": lane.model, "decodes": lane.decodes}
        facts |= {"entries": lane.entries, "todo": lane.todo, "arriving": lane.arriving}
        facts |= {"pages": len(spans.held_pages(lane.table)), "bytes": lane.pool.geometry.table_bytes(lane.table)}
        facts["pool"] = list(where).index(id(lane.pool))
        if snapshot.owners[lane.owner][0] and len(lane.table) <= left:
            left -= len(lane.table)
            table = lane.table[:, [PAGE, START, STOP, POSITION]]
            table[:, 0] = where[id(lane.pool)].placed(table[:, 0])
            facts["spans"] = table.ravel().tolist()
        lanes.append(facts)
    facts = {"owners": snapshot.owners, "waiting": snapshot.waiting, "tiers": snapshot.tiers}
    return {"pools": pools, "lanes": lanes, **facts}


def run_lengths(cells: np.ndarray) -> list[int]:
    """Run-length encoding: [count, value, count, value, ...]."""
    if not len(cells):
        return []
    stops = np.append(np.flatnonzero(cells[1:] != cells[:-1]) + 1, len(cells))
    counts = np.diff(stops, prepend=0)
    return np.stack([counts, cells[stops - 1]], axis=1).ravel().tolist()
