"""The FastAPI application."""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.methods import load_installed
from twostroke.server import admin
from twostroke.server.anthropic import routes as anthropic
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.contexts import routes as contexts
from twostroke.server.contexts.contexts import Contexts
from twostroke.server.contexts.saved import SavedContexts
from twostroke.server.error_responses import error_response
from twostroke.server.errors import ApiError, from_validation, to_api_error
from twostroke.server.http.middleware import CallMiddleware, Validate
from twostroke.server.http.origin_guard import OriginGuard
from twostroke.server.http.paths import HeadMiddleware, RouteTable
from twostroke.server.http.responses import ClientDisconnected, gone
from twostroke.server.http.rewriting import RewrittenCalls
from twostroke.server.llamacpp import routes as llamacpp
from twostroke.server.observability.metrics import Metrics, ServerMetrics
from twostroke.server.ollama import models as ollama_models
from twostroke.server.ollama import routes as ollama
from twostroke.server.openai.routes import generate, models, prefills, responses, tokens
from twostroke.server.openai.stored_responses import StoredResponses
from twostroke.server.page import api_docs, study
from twostroke.server.page import routes as page
from twostroke.server.page.feed import EngineFeed
from twostroke.server.served_engine import LocalEngine, ServedEngine
from twostroke.server.settings import Settings
from twostroke.server.tenants.api_keys import ApiKeys
from twostroke.server.tenants.tenant import LIMIT_HEADERS

log = logging.getLogger(__name__)
ROUTES = (
    *(generate, responses, contexts, models, tokens, prefills, anthropic, ollama),
    *(ollama_models, llamacpp, admin, page, study, api_docs),
)
DEFAULT_CONTEXT_BYTES = 1 << 30
CORS: dict[str, Any] = {
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["x-request-id", "request-id", "retry-after", "x-twostroke-warnings", *LIMIT_HEADERS],
    "allow_private_network": True,  # from a page of the internet to a server of the local network
}


def create_app(model: LLM | ServedEngine, settings: Settings | None = None, host: str | None = None) -> FastAPI:
    """An application that serves one model.

    Args:
        model: an `LLM`, whose engine nobody else may use once the application has started, or an engine elsewhere.
        settings: how it behaves.
        host: where it listens, which decides what calls of browsers a server without a key takes.
    """
    served = LocalEngine(model) if isinstance(model, LLM) else model
    settings, llm = settings or Settings(), served.llm
    load_installed()
    keys = ApiKeys(settings.api_key, settings.api_key_file)
    metrics = ServerMetrics(keys)
    vllm_name = (settings.model_name or llm.name) if settings.vllm_metrics else None
    engine = AsyncEngine(served, settings, Metrics(llm, vllm_name))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        app.state.contexts.restore(SavedContexts.of(llm))
        yield
        app.state.contexts.clear()
        await engine.stop()

    app = routes_app(engine, lifespan)
    app.state.metrics = metrics
    surround(app, settings, keys, engine.body_validator.validate, host, metrics.responded)
    return app


def surround(
    app: FastAPI,
    settings: Settings,
    keys: ApiKeys,
    validate: Validate,
    host: str | None,
    on_response: Callable[[int], None],
) -> None:
    """Put what is around every call around an application."""
    guard = None if host is None else OriginGuard.for_address(host, settings.allowed_hosts, settings.cors)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(
        CallMiddleware,
        settings=settings,
        keys=keys,
        validate=validate,
        guard=guard,
        on_response=on_response,
    )
    if settings.cors:  # outside of keys: a CORS preflight has none, and a refusal must be readable too
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, **CORS)
    app.add_middleware(RewrittenCalls)


def routes_app(engine: AsyncEngine, lifespan: Any = None) -> FastAPI:
    """The routes over an engine, and what becomes of their errors; without what is around every call."""
    app = FastAPI(title="Twostroke", version=version("twostroke"), docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.engine = engine
    app.state.stored_responses = StoredResponses(engine.settings.max_stored, engine.settings.max_stored_bytes)
    most = engine.settings.max_context_bytes
    app.state.contexts = Contexts(DEFAULT_CONTEXT_BYTES if most is None else most)
    app.state.feeds = [EngineFeed(engine, i) for i in range(len(engine.served.parts))]
    app.state.paths = RouteTable(routes.router for routes in ROUTES)
    for routes in ROUTES:
        app.include_router(routes.router)
    add_error_handlers(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error in the form of the API that was called. `app.state.paths` knows which paths there are."""
    app.add_exception_handler(ClientDisconnected, gone)
    for kind in (ApiError, InvalidRequest, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_response)


async def _error_response(http: HttpRequest, error: Exception) -> Response:
    """Every error, in the form of the API that was called."""
    return error_response(http.url.path, _refusal(http, error))


def _refusal(http: HttpRequest, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return to_api_error(error)
        case RequestValidationError():
            return from_validation(error.errors())
        case HTTPException(status_code=404 | 405):
            return http.app.state.paths.not_found(http.scope)
        case HTTPException(status_code=400):  # of FastAPI, for a body that Python's reader of JSON fails at
            return ApiError(400, "the body is not JSON in UTF-8, or is nested too deeply")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            log.error("a handler failed", exc_info=error)
            return ApiError(500, "the server failed; its log has the reason", code="internal_error")
