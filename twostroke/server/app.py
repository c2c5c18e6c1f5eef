"""The FastAPI application."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from twostroke.errors import InvalidRequest
from twostroke.llm import LLM
from twostroke.server.door import Door
from twostroke.server.errors import ApiError, from_validation, invalid
from twostroke.server.metrics import Metrics
from twostroke.server.respond import json_response
from twostroke.server.routes import admin, generating, models, tokens
from twostroke.server.service import Service
from twostroke.server.settings import Settings

log = logging.getLogger(__name__)


def create_app(llm: LLM, settings: Settings | None = None) -> FastAPI:
    """An application that serves one model. From its start on, the model's engine belongs to a thread of its own."""
    settings = settings or Settings()
    service = Service(llm, settings, Metrics(llm))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(title="Twostroke", version=version("twostroke"), lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Door, settings=settings)
    for routes in (generating, models, tokens, admin):
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(InvalidRequest, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(Exception, _answer)
    return app


async def _answer(_: HttpRequest, error: Exception) -> Response:
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
            return ApiError(500, "the server made a mistake; its log says more", code="internal_error")
