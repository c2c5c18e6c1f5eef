"""The FastAPI application."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from twostroke.errors import InvalidRequest
from twostroke.llm import LLM
from twostroke.methods import load_installed
from twostroke.server import admin
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError, from_validation, invalid
from twostroke.server.metrics import Metrics
from twostroke.server.middleware import Middleware
from twostroke.server.openai.routes import generate, models, tokens
from twostroke.server.settings import Settings
from twostroke.server.transport import json_response

log = logging.getLogger(__name__)


def create_app(llm: LLM, settings: Settings | None = None) -> FastAPI:
    """An application that serves one model. Once it has started, only its own thread may use the model's engine."""
    settings = settings or Settings()
    load_installed()
    engine = AsyncEngine(llm, settings, Metrics(llm))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        yield
        await engine.stop()

    app = routes_app(engine, lifespan)
    app.add_middleware(Middleware, settings=settings, preflight=engine.preflight)
    return app


def routes_app(engine: AsyncEngine, lifespan: Any = None) -> FastAPI:
    """The routes over an engine, and what becomes of their errors; without what is around every call."""
    app = FastAPI(title="Twostroke", version=version("twostroke"), lifespan=lifespan)
    app.state.engine = engine
    for routes in (generate, models, tokens, admin):
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, _error_response)
    app.add_exception_handler(InvalidRequest, _error_response)
    app.add_exception_handler(RequestValidationError, _error_response)
    app.add_exception_handler(HTTPException, _error_response)
    app.add_exception_handler(Exception, _error_response)
    return app


async def _error_response(_: HttpRequest, error: Exception) -> Response:
    """Every error, as OpenAI's error object."""
    refusal = _refusal(error)
    return json_response(refusal.body(), refusal.status, refusal.headers)


def _refusal(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return invalid(error)
        case RequestValidationError():
            return from_validation(error.errors())
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            log.error("a handler failed", exc_info=error)
            return ApiError(500, "the server failed; its log has the reason", code="internal_error")
