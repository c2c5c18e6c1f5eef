"""One model of several: its engine and its routes once they are there, and the calls that it has."""

import asyncio
import math
import time
from collections.abc import Callable

from fastapi import FastAPI

from twostroke.server.async_engine import AsyncEngine
from twostroke.server.engine_process.link import LinkOpener
from twostroke.server.engine_process.remote import RemoteEngine
from twostroke.server.errors import ApiError
from twostroke.server.models.source import ModelSource

RETRY_S = 0.05


class ServedModel:
    """Every method belongs to the event loop's thread.

    Attributes:
        app: its routes; None until it is loaded for the first time. They stay when the model leaves.
        loaded: whether calls may go to it.
        leaving: it has to make room: its calls end, and new ones wait.
        running: calls that it serves.
        waiting: calls that wait until it is loaded, each with the future that lets it in.
        keep_s: seconds that it stays without a call.
        used: when it had a call last, in seconds of the monotonic clock.
        loads: how many times it was loaded.
    """

    def __init__(self, source: ModelSource, keep_s: float, watchdog_s: float) -> None:
        self.source, self.name = source, source.name
        self.app: FastAPI | None = None
        self.loaded = self.leaving = False
        self.running = self.loads = 0
        self.waiting: list[asyncio.Future[None]] = []
        self.default_keep_s = self.keep_s = keep_s
        self.used = time.monotonic()
        self.expiry: asyncio.TimerHandle | None = None
        self._remote: RemoteEngine | None = None
        self._watchdog_s = watchdog_s

    @property
    def engine(self) -> AsyncEngine | None:
        """Its engine as routes see it; None until it is loaded for the first time."""
        return None if self.app is None else self.app.state.engine

    @property
    def open(self) -> bool:
        """Whether a call may go to it at once."""
        return self.loaded and not self.leaving and not self.lost

    @property
    def state(self) -> str:
        """In llama.cpp's words."""
        if self.lost:
            return "failed"
        if self.loaded and self.engine is not None:
            return "loading" if self.engine.served.restarting else "loaded"
        return "loading" if self.waiting else "unloaded"

    @property
    def lost(self) -> bool:
        """Whether its engine has failed, so that only a new one can serve it."""
        return self.engine is not None and self.engine.lost

    @property
    def wanted_bytes(self) -> int:
        """What it takes: what its engine has added up, or what is known before."""
        if self.engine is None:
            return self.source.least_bytes
        parts = self.engine.llm.memory.parts
        return sum(size for what, size in parts.items() if what != "spare")

    @property
    def expires_in_s(self) -> float:
        """Seconds until it leaves if no call comes."""
        return self.keep_s if self.running else self.used + self.keep_s - time.monotonic()

    def keep(self, seconds: float) -> None:
        """Stay so long without a call; below 0 for ever."""
        self.keep_s = math.inf if seconds < 0 else seconds

    def admit(self) -> None:
        """Let all in that wait."""
        for place in self.waiting:
            if not place.done():
                self.running += 1
                place.set_result(None)
        self.waiting.clear()

    def refuse(self, error: ApiError) -> None:
        """Send all away that wait."""
        for place in self.waiting:
            if not place.done():
                place.set_exception(error)
        self.waiting.clear()

    async def load(self, make_app: Callable[[RemoteEngine], FastAPI]) -> None:
        """Start its process. Raises what `LLM` raises."""
        if self.lost and self.engine is not None:
            await self.engine.stop()
            self.app = self._remote = None
        if self._remote is None:
            remote = await asyncio.to_thread(RemoteEngine, LinkOpener(self.source.launch), self._watchdog_s)
            self.app = make_app(remote)
            self._remote = remote
            self.app.state.engine.start()
        else:
            await asyncio.wrap_future(self._remote.wake())
        self.loaded = True
        self.loads += 1
        self.keep_s, self.used = self.default_keep_s, time.monotonic()

    async def unload(self) -> None:
        """End its process, which writes what waits for a tier. Nothing may be running."""
        self.loaded = False
        assert self._remote is not None
        assert self.engine is not None
        while (rested := self._remote.rest()) is None and not self.lost and self._remote.alive:
            await asyncio.sleep(RETRY_S)  # somebody looks at it, or its process is started again
        if rested is not None:
            await asyncio.wrap_future(rested)
        await asyncio.to_thread(self.engine.body_validator.stop)
