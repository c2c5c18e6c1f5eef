"""Routes about models: there is one, it is loaded, and it cannot be changed from outside."""

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.models.config import ModelConfig
from twostroke.models.tensor_shapes import tensor_shapes
from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.engine_requests import choose_method
from twostroke.server.errors import ApiError
from twostroke.server.http.responses import json_response
from twostroke.server.ollama.translate import NAMES
from twostroke.server.openai.schemas.base_model import LenientModel
from twostroke.server.tenants.tenant import current_tenant

# Clients compare it with the version in which a feature came. The routes here are those of this version.
API_VERSION = "0.12.6"
_QUANTIZED = re.compile(r"(?:I?Q\d\w*|BF16|F16|F32|MXFP4)(?=\.gguf$)", re.IGNORECASE)

router = APIRouter(prefix="/api")


class NamedBody(LenientModel):
    """A body that names a model; `name` is what it was called first. `stream` is of `pull`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"name": "model"}
    model: str = ""
    stream: bool = True


@router.get("/version")
async def version() -> Response:
    """The version of Ollama's API that this one follows."""
    return json_response({"version": API_VERSION})


@router.get("/tags")
async def tags(http: HttpRequest) -> Response:
    """The model."""
    engine: AsyncEngine = http.app.state.engine
    return json_response({"models": [_model(engine)] if current_tenant().may_use(engine.name) else []})


@router.get("/ps")
async def running(engine: CurrentEngine) -> Response:
    """The model, which is always loaded."""
    model = _model(engine)
    expires = (datetime.now(UTC) + timedelta(days=365)).isoformat()
    status = {"expires_at": expires, "size_vram": 0, "context_length": engine.llm.max_model_len}
    return json_response({"models": [model | status] if current_tenant().may_use(engine.name) else []})


@router.post("/show")
async def show(body: NamedBody, engine: CurrentEngine) -> Response:
    """Describe the model."""
    _check(engine, body)
    config, template, thinks = engine.llm.config, engine.llm.tokenizer.chat_template, engine.reasoning is not None
    kind = config.architecture
    model, names = _model(engine), {ours: theirs for theirs, ours in NAMES.items()}
    info: dict[str, Any] = {
        "general.architecture": kind,
        "general.basename": engine.name,
        "general.parameter_count": _count(engine.llm.config),
        f"{kind}.context_length": engine.llm.max_model_len,
        f"{kind}.embedding_length": engine.llm.embedder.size,
        f"{kind}.block_count": len(config.layers),
        f"{kind}.attention.head_count": config.num_heads,
        f"{kind}.attention.head_count_kv": config.num_kv_heads,
        f"{kind}.vocab_size": config.vocab_size,
    }
    infill = engine.llm.tokenizer.infill is not None
    pooling = engine.llm.embedder.pooling
    embeds = pooling.stated and pooling.refusal is None
    decodes = not config.both_ways
    tools = decodes and template
    capabilities = {"completion": decodes, "embedding": embeds, "tools": tools, "insert": infill, "thinking": thinks}
    return json_response(
        {
            "modelfile": f"FROM {engine.name}",
            "parameters": "\n".join(
                f"{names.get(name, name)} {value:g}" for name, value in engine.llm.generation.items()
            ),
            "template": template or "",
            "details": model["details"],
            "model_info": info,
            "capabilities": [name for name, there in capabilities.items() if there],
            "modified_at": model["modified_at"],
        }
    )


@router.post("/pull")
async def pull(body: NamedBody, http: HttpRequest) -> Response:
    """Nothing to do for the model that is there. Raises ApiError for any other."""
    _check(http.app.state.engine, body)
    return json_response({"status": "success"})


@router.post("/push")
@router.post("/create")
@router.post("/copy")
@router.delete("/delete")
@router.post("/blobs/{digest}")
async def change() -> Response:
    """Models are chosen when the server starts."""
    raise unchangeable()


def unchangeable() -> ApiError:
    """The error for a change of models that the operator has not allowed, or that there is no way to make."""
    message = "models cannot be changed through this server: `twostroke serve --manage-models` lets pull and delete"
    return ApiError(400, message)


def _check(engine: AsyncEngine, body: NamedBody) -> None:
    choose_method(engine.name, body.model, None)


def _model(engine: AsyncEngine) -> dict[str, Any]:
    return model_facts(engine.name, engine.llm.path, engine.llm.config)


def model_facts(name: str, path: Path, config: ModelConfig) -> dict[str, Any]:
    """A model as lists show it."""
    status = path.stat()
    modified = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
    count, quantized = _count(config), _QUANTIZED.search(path.name)
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": status.st_size,
        "digest": hashlib.sha256(f"{name} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": path.suffix.removeprefix("."),
            "family": config.architecture,
            "families": [config.architecture],
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
            "quantization_level": quantized[0].upper() if quantized else "unknown",
        },
    }


def _count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())
