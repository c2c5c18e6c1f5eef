"""/v1/models: the model, and the model with each technique. With Anthropic's fields beside OpenAI's."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.methods import METHODS
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.engine_requests import choose_method
from twostroke.server.http.responses import json_response

router = APIRouter(prefix="/v1/models")


@router.get("")
async def models(http: HttpRequest) -> Response:
    """All names that the field `model` may have."""
    engine: AsyncEngine = http.app.state.engine
    there = engine.llm.engine.models.keys()
    methods = [name for name in sorted(METHODS) if there >= set(METHODS[name]().companions)]
    names = [engine.name, *(f"{engine.name}:{method}" for method in methods)]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": [_model(engine, name) for name in names], **page})


@router.get("/{name:path}")
async def model(name: str, http: HttpRequest) -> Response:
    """One of them. 404 for any other."""
    engine: AsyncEngine = http.app.state.engine
    choose_method(engine.name, name, None)
    return json_response(_model(engine, name))


def _model(engine: AsyncEngine, name: str) -> dict[str, Any]:
    facts = {"id": name, "object": "model", "created": engine.created, "owned_by": "twostroke"}
    facts |= {"type": "model", "display_name": name, "created_at": datetime.fromtimestamp(engine.created, UTC)}
    return facts | {"max_model_len": engine.llm.max_model_len, "root": engine.name}
