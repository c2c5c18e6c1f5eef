"""The application of several models: what is around every call, and the routes of each model inside."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from twostroke.engine.memory_budget import MemoryBudget
from twostroke.methods import load_installed
from twostroke.server.app import ROUTES, add_error_handlers, routes_app, surround
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.contexts.saved import SavedContexts
from twostroke.server.engine_process.remote import RemoteEngine
from twostroke.server.errors import ApiError
from twostroke.server.http.paths import RouteTable
from twostroke.server.models import routes
from twostroke.server.models.dispatcher import ModelDispatcher
from twostroke.server.models.downloads import ModelDownloads, OpenModel
from twostroke.server.models.served_models import ServedModels
from twostroke.server.models.settings import SharingSettings
from twostroke.server.models.source import ModelSource
from twostroke.server.observability.metrics import Metrics, ServerMetrics
from twostroke.server.openai.stored_responses import StoredResponses
from twostroke.server.page import api_docs
from twostroke.server.settings import Settings
from twostroke.server.tenants.api_keys import ApiKeys


def create_models_app(
    sources: Sequence[ModelSource],
    sharing: SharingSettings | None = None,
    settings: Settings | None = None,
    host: str | None = None,
    open_model: OpenModel | None = None,
) -> FastAPI:
    """An application that serves several models, each while it is used. The first one is loaded at once.

    `host` is where it listens, as in `create_app`. `open_model` makes a source of a name, for models that come while
    the server runs; without it none do. A name that two models have is refused (InvalidRequest).
    """
    settings, sharing = settings or Settings(), sharing or SharingSettings()
    load_installed()
    keys = ApiKeys(settings.api_key, settings.api_key_file)
    stored = StoredResponses(settings.max_stored, settings.max_stored_bytes)
    metrics = ServerMetrics(keys)

    def routes_of(source: ModelSource, engine: RemoteEngine) -> FastAPI:
        own = replace(settings, model_name=source.name)
        counted = Metrics(engine.llm, source.name if settings.vllm_metrics else None)
        made = routes_app(AsyncEngine(engine, own, counted))
        made.state.stored_responses = stored
        made.state.contexts.restore(SavedContexts.of(engine.llm))
        return made

    most_bytes = sharing.models_bytes or MemoryBudget.now().left_bytes
    models = ServedModels(sources, sharing, most_bytes, routes_of, settings.watchdog_timeout_s)
    downloads = ModelDownloads(models, open_model)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        first = asyncio.create_task(_load_first(models))
        yield
        first.cancel()
        await models.stop()

    app = _Described(title="Twostroke", version=version("twostroke"), docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.engine, app.state.metrics = models, metrics
    app.state.downloads = downloads
    app.state.paths = RouteTable(one.router for one in (*ROUTES, routes))
    for one in (routes, api_docs):
        app.include_router(one.router)
    app.router.default = dispatcher = ModelDispatcher(models, app.state.paths)
    add_error_handlers(app)
    surround(app, settings, keys, dispatcher.validate, host, metrics.responded)
    return app


class _Described(FastAPI):
    """Its description, for `/docs` and `/openapi.json`, is that of a server of one model, which has the same paths."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            whole = FastAPI(title=self.title, version=self.version)
            for one in ROUTES:
                whole.include_router(one.router)
            self.openapi_schema = whole.openapi()
        return self.openapi_schema


async def _load_first(models: ServedModels) -> None:
    """Load the default model before somebody calls. If that fails, the log has the reason, and each call gets it."""
    with suppress(ApiError):
        async with models.using(models.default):
            pass
