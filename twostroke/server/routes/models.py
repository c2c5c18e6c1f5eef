"""/v1/models: the model, and the model with each technique."""

from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.methods import METHODS
from twostroke.server.requesting import choose_method
from twostroke.server.respond import json_response
from twostroke.server.service import Service

router = APIRouter(prefix="/v1/models")


@router.get("")
async def models(http: HttpRequest) -> Response:
    """All names that the field `model` may have."""
    service: Service = http.app.state.service
    there = service.llm.engine.models.keys()
    methods = [name for name in sorted(METHODS) if there >= set(METHODS[name]().companions)]
    names = [service.name, *(f"{service.name}:{method}" for method in methods)]
    return json_response({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/{name:path}")
async def model(name: str, http: HttpRequest) -> Response:
    """One of them. 404 for any other."""
    service: Service = http.app.state.service
    choose_method(service.name, name, None)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    facts = {"id": name, "object": "model", "created": service.created, "owned_by": "twostroke"}
    return facts | {"max_model_len": service.llm.config.max_position, "root": service.name}
