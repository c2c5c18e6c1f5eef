"""/v1/models: the model. With Anthropic's fields beside OpenAI's."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response

from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.engine_requests import choose_method
from twostroke.server.http.responses import json_response
from twostroke.server.tenants.tenant import current_tenant

router = APIRouter(prefix="/v1/models")


@router.get("")
async def models(engine: CurrentEngine) -> Response:
    """The model, once, if the caller's key may use it: menus of clients show each entry.

    `/methods` lists the techniques for `NAME:METHOD`.
    """
    listed = [_model(engine, engine.name)] if current_tenant().may_use(engine.name) else []
    first = listed[0]["id"] if listed else None
    return json_response({"object": "list", "data": listed, "has_more": False, "first_id": first, "last_id": first})


@router.get("/{name:path}")
async def model(name: str, engine: CurrentEngine) -> Response:
    """The model under any name that it has: `NAME`, `NAME:METHOD`, `NAME:latest`. 404 for any other."""
    choose_method(engine.name, name, None)
    return json_response(_model(engine, name))


def _model(engine: AsyncEngine, name: str) -> dict[str, Any]:
    body = {"id": name, "object": "model", "created": engine.created, "owned_by": "twostroke"}
    body |= {"type": "model", "display_name": name, "created_at": datetime.fromtimestamp(engine.created, UTC)}
    return body | {"max_model_len": engine.llm.max_model_len, "root": engine.name}
