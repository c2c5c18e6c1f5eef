"""The models of a server: a call waits until its model is loaded, for which others may have to leave.

The one that was not used for longest leaves first. Calls that run are never cut: a model that has to leave ends them,
and its new calls wait for their turn. So a busy model keeps no other one out for ever.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from twostroke.errors import EngineStopped, InvalidRequest, TwostrokeError
from twostroke.methods import METHODS
from twostroke.server.engine_process.remote import RemoteEngine
from twostroke.server.errors import ApiError, ShuttingDown
from twostroke.server.models.served_model import ServedModel
from twostroke.server.models.settings import SharingSettings
from twostroke.server.models.source import ModelSource
from twostroke.server.tenants.tenant import current_tenant

log = logging.getLogger(__name__)
LOOK_S = 0.25  # between two looks whether a model is loaded


class ServedModels:
    """All of them, the default one first. Every method belongs to the event loop's thread.

    It has what the server's process asks an `AsyncEngine` for: `leaving`, `lost`, `drain`, `warm_up`.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        sharing: SharingSettings,
        most_bytes: int,
        make_app: Callable[[ModelSource, RemoteEngine], FastAPI],
        watchdog_s: float,
    ) -> None:
        """With what all loaded models may take, how the routes of one are made, and when an engine hangs."""
        if twice := [name for name, times in Counter(source.name for source in sources).items() if times > 1]:
            raise InvalidRequest(f"two models have the name {twice[0]}: name each once")
        keep_s = math.inf if sharing.unload_after_s < 0 else sharing.unload_after_s
        self.all = {source.name: ServedModel(source, keep_s, watchdog_s) for source in sources}
        self.default = next(iter(self.all.values()))
        self.created = int(time.time())
        self.leaving = self.draining = self.lost = False
        self._most_bytes, self._most = most_bytes, sharing.max_loaded or math.inf
        self._make_app = make_app
        self._keep_s, self._watchdog_s = keep_s, watchdog_s
        self._changing = asyncio.Lock()
        self._left = asyncio.Event()  # set when a call has ended or has given up
        self._tasks: dict[ServedModel, asyncio.Task[None]] = {}

    @property
    def in_flight(self) -> int:
        """Choices that wait or run."""
        return sum(model.engine.in_flight for model in self.all.values() if model.engine is not None)

    # Names ------------------------------------------------------------------------------------------------------------

    @property
    def allowed(self) -> list[ServedModel]:
        """Those that the caller's key may use."""
        return [model for model in self.all.values() if current_tenant().may_use(model.name)]

    def find(self, name: str | None) -> ServedModel:
        """The model of a name: its own, with `:latest`, or as `NAME:METHOD`. None is the default one.

        Raises ApiError: 404 if there is none, 403 if the caller's key may not use it.
        """
        found = self.default if name is None else self._named(name)
        if found is None:
            raise self._missing(name)
        if not current_tenant().may_use(found.name):
            current_tenant().require(found.name, "plain")
        return found

    def _missing(self, name: str | None) -> ApiError:
        names = ", ".join(model.name for model in self.allowed)
        message = f"there is no model {name!r:.100}; there are: {names or 'none'}"
        return ApiError(404, message, param="model", code="model_not_found")

    def serves(self, name: str) -> bool:
        """Whether a model has this name."""
        return self._named(name) is not None

    def _named(self, name: str) -> ServedModel | None:
        if (found := self.all.get(name) or self.all.get(name.removesuffix(":latest"))) is not None:
            return found
        served, _, method = name.rpartition(":")
        return self.all.get(served) if method in METHODS else None

    # Calls ------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncGenerator[None]:
        """A model is loaded, and stays until the end. Raises ApiError if it cannot be loaded."""
        await self.enter(model)
        try:
            yield
        finally:
            self.leave(model)

    async def enter(self, model: ServedModel, keep_s: float | None = None) -> None:
        """Wait until a model is loaded; it stays until `leave`. Raises ApiError if it cannot be loaded.

        `keep_s` is how long it stays without a call from then on.
        """
        await self._admission(model)
        if keep_s is not None:
            model.keep(keep_s)

    async def _admission(self, model: ServedModel) -> None:
        self._require(model)
        if model.expiry is not None:
            model.expiry.cancel()
        if model.open:
            model.running += 1
            return
        place = asyncio.get_running_loop().create_future()
        model.waiting.append(place)
        if model not in self._tasks:
            self._tasks[model] = asyncio.create_task(self._load(model))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(model)
            elif place in model.waiting:
                model.waiting.remove(place)
                self._left.set()
            raise

    def _require(self, model: ServedModel) -> None:
        """Raise ApiError if the server ends, or if the model was removed since it was found."""
        if self.draining:
            raise ShuttingDown
        if self.all.get(model.name) is not model:
            raise self._missing(model.name)

    async def until_loaded(self, model: ServedModel) -> None:
        """Wait until others have a model loaded. Raises ApiError once the server ends."""
        while not model.loaded:
            self._require(model)
            await asyncio.sleep(LOOK_S)

    def leave(self, model: ServedModel) -> None:
        """A call of a model has ended."""
        model.running -= 1
        model.used = time.monotonic()
        self._left.set()
        if not model.running and not math.isinf(model.keep_s):
            loop = asyncio.get_running_loop()
            model.expiry = loop.call_later(model.keep_s, lambda: self._expire(model))

    def _expire(self, model: ServedModel) -> None:
        if model not in self._tasks and not self.draining:
            self._tasks[model] = asyncio.create_task(self._unload_unused(model))

    # Loading and unloading, one at a time -----------------------------------------------------------------------------

    async def _load(self, model: ServedModel) -> None:
        try:
            async with self._changing:
                if not model.loaded or model.lost:
                    await self._make_room(model)
                    log.info("loading the model %s", model.name)
                    await model.load(lambda remote: self._make_app(model.source, remote))
                model.leaving = False
                model.admit()
        except (TwostrokeError, OSError, ApiError) as error:
            if not isinstance(error, EngineStopped | ApiError):
                log.error("the model %s cannot be loaded: %s", model.name, error)
            refusal = error if isinstance(error, ApiError) else _unloadable(model, error)
            model.refuse(refusal)
        except BaseException:
            model.refuse(ApiError(500, f"the model {model.name} could not be loaded", code="model_not_loaded"))
            raise
        finally:
            self._done(model)

    async def _unload_unused(self, model: ServedModel) -> None:
        try:
            async with self._changing:
                if model.loaded and not model.running and model.used + model.keep_s <= time.monotonic() + 0.001:
                    await self._unload(model)
        finally:
            self._done(model)

    def _done(self, model: ServedModel) -> None:
        """The task of a model has ended; calls that have come since begin another one."""
        del self._tasks[model]
        if any(not place.done() for place in model.waiting):
            self._tasks[model] = asyncio.create_task(self._load(model))

    def add(self, source: ModelSource) -> None:
        """Serve one more model, unless its name is taken."""
        self.all.setdefault(source.name, ServedModel(source, self._keep_s, self._watchdog_s))

    async def remove(self, model: ServedModel) -> None:
        """Serve a model no more, and end its process. Raises ApiError if calls have it, or if it is gone."""
        async with self._changing:
            self._require(model)
            if model.running or model.waiting:
                calls = model.running + len(model.waiting)
                raise ApiError(409, f"{calls} calls use the model {model.name}: try again when they have ended")
            del self.all[model.name]
            if model.loaded:
                await self._unload(model)
            if model.engine is not None:
                await model.engine.stop()

    async def _make_room(self, model: ServedModel) -> None:
        """Let others leave until there is room. Raises ApiError once nobody waits for it any more."""
        try:
            while others := self._in_the_way(model):
                victim = min(others, key=lambda one: (one.running > 0, not one.leaving, one.used))
                if not victim.running:
                    await self._unload(victim)
                    continue
                victim.leaving = True
                if not model.waiting:
                    raise ApiError(499, "nobody waits for the model any more")
                self._left.clear()
                await self._left.wait()
        finally:
            for one in self.all.values():
                one.leaving = False

    def _in_the_way(self, model: ServedModel) -> list[ServedModel]:
        """Loaded models of which one must leave before this one comes; empty if there is room."""
        others = [one for one in self.all.values() if one.loaded and one is not model]
        taken = sum(one.wanted_bytes for one in others) + model.wanted_bytes
        return others if len(others) >= self._most or taken > self._most_bytes else []

    async def _unload(self, model: ServedModel) -> None:
        log.info("unloading the model %s", model.name)
        await model.unload()

    # What the server's process asks for -------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Nothing: what the first calls wait for is prepared when a model is loaded."""

    def drain(self, grace_s: float) -> None:
        """Take no new work, and cancel what still runs after `grace_s` seconds."""
        self.draining = True
        self._left.set()
        for model in self.all.values():
            model.refuse(ShuttingDown())
            if model.engine is not None:
                model.engine.drain(grace_s)

    async def stop(self) -> None:
        """End all processes."""
        self.draining = True
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        engines = [model.engine for model in self.all.values() if model.engine is not None]
        await asyncio.gather(*(engine.stop() for engine in engines))


def _unloadable(model: ServedModel, error: Exception) -> ApiError:
    return ApiError(503, f"the model {model.name} cannot be loaded: {error}", code="model_not_loaded")
