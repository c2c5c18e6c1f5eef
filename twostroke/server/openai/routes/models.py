"""/v1/models: the model. With Anthropic's fields beside OpenAI's."""

from collections.abc import Sequence
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
    allowed = current_tenant().may_use(engine.name)
    return listed([_model(engine, engine.name)] if allowed else [])


@router.get("/{name:path}")
async def model(name: str, engine: CurrentEngine) -> Response:
    """The model under any name that it has: `NAME`, `NAME:METHOD`, `NAME:latest`. 404 for any other."""
    choose_method(engine.name, name, None)
    return json_response(_model(engine, name))


def listed(data: Sequence[dict[str, Any]]) -> Response:
    """The list of models; it has one page."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return json_response({"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last})


def _model(engine: AsyncEngine, name: str) -> dict[str, Any]:
    return described(name, engine.name, engine.created, engine.llm.max_model_len)


def described(name: str, root: str, created: int, max_model_len: int) -> dict[str, Any]:
    """A model in the list, under one of its names; `root` is its own."""
    body = {"id": name, "object": "model", "created": created, "owned_by": "twostroke"}
    body |= {"type": "model", "display_name": name, "created_at": datetime.fromtimestamp(created, UTC)}
    return body | {"max_model_len": max_model_len, "root": root}
