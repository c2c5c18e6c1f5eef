"""From a call to the routes of the model that it names, which is loaded for it. Nothing else of a body is looked at."""

import asyncio
import json
import math
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope, Send

from twostroke.server.body_validation.supervisor import LONG_BODY_BYTES, HttpCall, Reply
from twostroke.server.errors import ApiError
from twostroke.server.http.paths import RouteTable
from twostroke.server.http.responses import cancel_on_disconnect
from twostroke.server.models.served_models import ServedModels
from twostroke.server.ollama.routes import nothing_asked

# Calls that need no engine: they are answered from what stays when a model leaves.
WITHOUT_ENGINE = ("/v1/responses/", "/methods", "/props", "/slots", "/page/", "/tokenize", "/detokenize", "/api/show")
LOOKING = {"/watch"}  # streams that load no model, and keep none from leaving
_AT_AN_END = re.compile(rb'\A\s*{\s*"model"\s*:\s*"([\w./: -]*)"|"model"\s*:\s*"([\w./: -]*)"\s*}\s*\Z')
_KEEP = re.compile(rb'"keep_alive"')
_ASKING = {
    "/api/chat": ("messages",),
    "/api/generate": ("prompt", "suffix"),
}  # fields without which a call asks nothing
_FIELDS = ("model", "name", "keep_alive", "messages", "prompt", "suffix")
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class AskedModel:
    """What a call says. `name` is None where it names none; `keep_s` is infinite for ever.

    `unloads`: it is one of Ollama's that has nothing to answer, and only lets the model go.
    """

    name: str | None = None
    keep_s: float | None = None
    unloads: bool = False

    @classmethod
    async def of(cls, scope: Scope, body: bytes) -> "AskedModel":
        """What a call says in its body, or in its query as `?model=NAME`. Raises ApiError for a wrong `keep_alive`.

        A body that cannot be read says nothing here: the routes say what is wrong with it. A long one that begins or
        ends with the name is not read for it, and others are read in another thread.
        """
        query = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("model", [None])[-1]
        if not body:
            return cls(query)
        path: str = scope["path"]
        if len(body) <= LONG_BODY_BYTES:
            return cls._in(_read(body), query, path)
        found = _AT_AN_END.search(body)  # elsewhere a name may be that of a tool, or of what somebody quotes
        if found and found.lastindex and body.count(b'"model"') == 1 and not _KEEP.search(body):
            return cls(found[found.lastindex].decode("latin-1"))
        return cls._in(await asyncio.to_thread(_read, body), query, path)

    @classmethod
    def _in(cls, fields: dict[str, Any], query: str | None, path: str) -> "AskedModel":
        ollama = path.startswith("/api/")
        name = fields.get("model") or (fields.get("name") if ollama else None)
        keep = fields.get("keep_alive") if ollama else None
        keep_s = None if keep is None else seconds_of(keep)
        unloads = keep_s == 0 and path in _ASKING and not any(map(fields.get, _ASKING[path]))
        return cls(name if isinstance(name, str) else query, keep_s, unloads)


def _read(body: bytes) -> dict[str, Any]:
    """The fields that matter, of a body that is an object, read as the routes do; none of any other."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return {key: fields.get(key) for key in _FIELDS} if isinstance(fields, dict) else {}


def seconds_of(value: Any) -> float:
    """Ollama's `keep_alive` in seconds: a number, or a duration as Go writes it (`5m`, `1h30m`, `-1`).

    Raises ApiError.
    """
    wrong = ApiError(
        400, f"keep_alive must be seconds, or a duration such as 5m, not {value!r:.60}", param="keep_alive"
    )
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value != value:  # NaN; `math.isnan` takes no integer of 400 digits
            raise wrong
        return math.inf if value < 0 or value > 1e9 else float(value)
    if not isinstance(value, str):
        raise wrong
    text = value.strip()
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        text += "s"
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise wrong
    total = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
    return math.inf if total * sign < 0 or total > 1e9 else total


class ModelDispatcher:
    """Serves the calls that belong to a model. Errors are ApiError's, in whose form the middleware sends them."""

    def __init__(self, models: ServedModels, paths: RouteTable) -> None:
        self._models, self._paths = models, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._paths.serves(scope):
            raise self._paths.not_found(scope)
        messages: list[Message] = [await receive()]  # the whole body, which the middleware has read
        asked = await AskedModel.of(scope, messages[0].get("body", b""))
        model = self._models.find(asked.name)

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        path = scope["path"]
        if asked.unloads and model.state == "unloaded":
            await nothing_asked(path, asked.name or model.name, "unload")(scope, receive, send)
            return
        if path in LOOKING:
            await cancel_on_disconnect(receive, self._models.until_loaded(model))
        elif model.app is None or not path.startswith(WITHOUT_ENGINE):
            await cancel_on_disconnect(receive, self._models.enter(model, asked.keep_s))
            try:
                assert model.app is not None
                await model.app({**scope, "keep_s": asked.keep_s}, replayed, send)
            finally:
                self._models.leave(model)
            return
        assert model.app is not None
        await model.app(scope, replayed, send)

    async def validate(self, call: HttpCall) -> Reply | None:
        """What the routes of the model that a long body names say of it, see `BodyValidator`. Raises ApiError."""
        model = self._models.find((await AskedModel.of(call.scope, call.body)).name)
        async with self._models.using(model):
            assert model.engine is not None
            return await model.engine.body_validator.validate(call)
