"""Health, load, the version, metrics, and the prefix cache."""

from importlib import metadata
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.engine.engine import Engine
from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.http.responses import json_response
from twostroke.server.observability.metrics import ServerMetrics
from twostroke.server.tenants.tenant import current_tenant

router = APIRouter()


@router.get("/health")
@router.get("/health/ready")
@router.get("/ping")  # vLLM's and SageMaker's name
@router.post("/ping")
async def ready(engine: CurrentEngine) -> Response:
    """200 while new calls should be sent here; 503 once the server is to end, a step hangs, or the engine failed."""
    return _health(engine, engine.ready)


@router.get("/health/live")
async def live(engine: CurrentEngine) -> Response:
    """200 while the engine lives; 503 once it has failed and the process must be restarted."""
    return _health(engine, engine.served.alive)


def _health(engine: AsyncEngine, fine: bool) -> Response:
    served = engine.served
    body: dict[str, Any] = {
        "live": served.alive,
        "restarting": served.restarting,
        "ready": engine.ready,
        "draining": engine.leaving or engine.draining,
        "step_age_s": round(served.step_age_s, 3),
        "in_flight": engine.in_flight,
        "failure": None if engine.failure is None else engine.failure.message,
    }
    if len(served.parts) > 1:
        body["replicas"] = [
            {"live": one.alive, "restarting": one.restarting, "step_age_s": round(one.step_age_s, 3)}
            for one in served.parts
        ]
    return json_response(body, 200 if fine else 503)


@router.get("/load")
async def load(engine: CurrentEngine) -> Response:
    """How many choices wait or run, by vLLM's name."""
    return json_response({"server_load": engine.in_flight})


@router.get("/version")
async def version() -> Response:
    """The server's version."""
    return json_response({"version": metadata.version("twostroke")})


@router.get("/metrics")
async def metrics(http: HttpRequest, engine: CurrentEngine) -> Response:
    """All metrics, in Prometheus' text format or in OpenMetrics, as the header Accept asks."""
    engine.metrics.families = await engine.families()
    server: ServerMetrics = http.app.state.metrics
    return server.exposition(engine.metrics.exported, http.headers.get("accept", ""))


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(engine: CurrentEngine) -> Response:
    """Empty the prefix indexes, so that the next request is a cold one. Returns how many pages they held."""
    current_tenant().require_admin()
    return json_response({"pages": sum(await engine.everywhere(_clear_indexes, between_steps=True))})


def _clear_indexes(engine: Engine) -> int:
    indexes = [model.index for model in engine.models.values() if model.index is not None]
    held = sum(index.num_pages for index in indexes)
    for index in indexes:
        index.clear()
    return held
