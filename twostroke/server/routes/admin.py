"""Health, metrics, and the prefix cache."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.engine.engine import Engine
from twostroke.server.respond import json_response
from twostroke.server.service import Service

router = APIRouter()


@router.get("/health")
@router.get("/health/ready")
async def ready(http: HttpRequest) -> Response:
    """200 while requests are taken; 503 from the moment the server drains, and once the engine has failed."""
    service: Service = http.app.state.service
    return _health(service, service.alive and not service.draining)


@router.get("/health/live")
async def live(http: HttpRequest) -> Response:
    """200 while the engine lives; 503 once it has failed and only a new process helps."""
    service: Service = http.app.state.service
    return _health(service, service.alive)


def _health(service: Service, fine: bool) -> Response:
    facts = {
        "live": service.alive,
        "ready": service.alive and not service.draining,
        "in_flight": service.in_flight,
        "failure": None if service.failure is None else service.failure.message,
    }
    return json_response(facts, 200 if fine else 503)


@router.get("/metrics")
async def metrics(http: HttpRequest) -> Response:
    """For Prometheus."""
    service: Service = http.app.state.service
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(http: HttpRequest) -> Response:
    """Forget all known prefixes, so that the next request is a cold one. Says how many pages the index held."""
    service: Service = http.app.state.service

    def clear(engine: Engine) -> int:
        indexes = [model.index for model in engine.models.values() if model.index is not None]
        held = sum(index.num_pages for index in indexes)
        for index in indexes:
            index.clear()
        return held

    return json_response({"pages": await service.call(clear)})
