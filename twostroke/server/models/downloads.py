"""Models that come and go while the server runs: Ollama's `pull` and `delete`, for models of the catalog.

One is fetched at a time, in a thread, whether or not the client that asked for it stays; a second client that asks for
the same model sees the same download. Every method belongs to the event loop's thread.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from pydantic_core import to_json

from twostroke.errors import TwostrokeError
from twostroke.models.checkpoints.catalog import CATALOG, CatalogEntry
from twostroke.models.checkpoints.fetch import model_path, remove
from twostroke.models.checkpoints.progress import POLL_SECONDS, Progress
from twostroke.server.errors import ApiError, ShuttingDown
from twostroke.server.models.served_model import ServedModel
from twostroke.server.models.served_models import ServedModels
from twostroke.server.models.source import ModelSource
from twostroke.server.ollama.models import unchangeable
from twostroke.server.tenants.tenant import current_tenant
from twostroke.system.daemon_threads import DaemonThreads
from twostroke.system.futures import fulfil

log = logging.getLogger(__name__)
BEGUN = {"status": "pulling manifest"}  # in Ollama's words, as all that follows
OpenModel = Callable[[str, Progress], ModelSource]  # fetches a model by name if it is not there, and looks at it


class ModelDownload:
    """One model on its way."""

    def __init__(self, models: ServedModels, entry: CatalogEntry) -> None:
        self.status: dict[str, Any] = BEGUN
        self.task: asyncio.Task[None]
        self._models, self._entry = models, entry

    def report(self, stage: str, done: int, total: int) -> None:
        """How far it is. Any thread may call it."""
        digest = self._entry.sha256
        if stage.startswith("downloading"):
            size = {"digest": f"sha256:{digest}", "total": total, "completed": min(done, total)}
            self.status = {"status": f"pulling {digest[:12]}", **size}
        else:
            self.status = {"status": "verifying sha256 digest" if stage in ("joining", "checking") else stage}

    async def lines(self) -> AsyncGenerator[bytes]:
        """Its status as lines of JSON, until the model is there. A client that leaves does not stop it."""
        try:
            async for status in self.updates():
                yield to_json(status) + b"\n"
        except ApiError as error:
            yield to_json({"error": error.message}) + b"\n"

    async def updates(self) -> AsyncGenerator[dict[str, Any]]:
        """Its status whenever there is news, until the model can be asked for. Raises ApiError if it does not come."""
        yield (told := BEGUN)
        while not self.task.done():
            if self._models.draining:
                raise ShuttingDown
            if self.status is not told:
                yield (told := self.status)
            await asyncio.wait([self.task], timeout=POLL_SECONDS)
        self.task.result()
        for status in ("writing manifest", "success"):
            yield {"status": status}


class ModelDownloads:
    """All of them. Without `open_model` nothing is fetched or removed."""

    def __init__(self, models: ServedModels, open_model: OpenModel | None) -> None:
        self._models, self._open_model = models, open_model
        self._coming: dict[str, ModelDownload] = {}
        self._going: set[str] = set()
        self._thread = DaemonThreads("fetching models", 1)

    def _require(self) -> OpenModel:
        """Raise ApiError unless the operator allowed it, and the caller's key may do what concerns everybody."""
        if self._open_model is None:
            raise unchangeable()
        current_tenant().require_admin()
        return self._open_model

    def pull(self, name: str) -> ModelDownload | None:
        """A model on its way; None if it is there. Raises ApiError."""
        name = name.removesuffix(":latest")
        if self._models.serves(name) or self._open_model is None:
            self._models.find(name)  # its errors are those of any call
            return None
        open_model = self._require()
        if (entry := CATALOG.get(name)) is None:
            raise ApiError(404, f"{name!r:.100} is not in the catalog, which has {', '.join(CATALOG)}", param="model")
        if name in self._going:
            raise ApiError(409, f"the model {name} is being deleted: try again", param="model")
        if name not in self._coming:
            download = self._coming[name] = ModelDownload(self._models, entry)
            download.task = asyncio.create_task(self._fetch(name, partial(open_model, name, download.report)))
            download.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait
        return self._coming[name]

    async def _fetch(self, name: str, open_model: Callable[[], ModelSource]) -> None:
        try:
            source: Future[ModelSource] = Future()
            self._thread.submit(lambda: fulfil(source, open_model))
            self._models.add(await asyncio.wrap_future(source))
        except Exception as error:
            log.error("the model %s was not fetched: %s", name, error)
            raise ApiError(502, str(error), code="model_not_fetched") from None
        finally:
            del self._coming[name]

    async def delete(self, name: str) -> None:
        """Unload a model and remove its file. Raises ApiError if it is not ours to delete, or in use."""
        self._require()
        model = self._models.find(name)
        entry = self._deletable(model)
        self._going.add(entry.name)
        try:
            await self._models.remove(model)
            await asyncio.to_thread(remove, entry)
        except (TwostrokeError, OSError) as error:
            raise ApiError(500, f"the model {model.name} was not deleted: {error}") from None
        finally:
            self._going.discard(entry.name)

    def _deletable(self, model: ServedModel) -> CatalogEntry:
        path = model.source.path
        entry = next((entry for entry in CATALOG.values() if model_path(entry) == path), None)
        if entry is None:
            raise ApiError(400, f"{model.name} was not downloaded by name: delete {path} yourself", param="model")
        if model is self._models.default:
            raise ApiError(400, f"{model.name} is the default model: start the server with another one", param="model")
        if others := [one.name for one in self._models.all.values() if one is not model and one.source.path == path]:
            raise ApiError(409, f"{model.name} has the file of {others[0]}, which is served too", param="model")
        return entry
