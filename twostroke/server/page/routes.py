"""The page's files, and what they ask the server for besides its APIs.

The files are the same for everybody and hold nothing of the server, so a browser gets them without a key. What they
show comes from routes that need it. A browser must treat the page strictly: it runs and loads only these files, talks
only to this server, is shown in no other page's frame, and never makes markup of a text (trusted types).
"""

import dataclasses
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi import Request as HttpRequest

from twostroke.errors import InvalidRequest
from twostroke.fields import Rule, rules
from twostroke.methods import METHODS
from twostroke.methods.method import Method
from twostroke.server.async_engine import AsyncEngine, CurrentEngine
from twostroke.server.errors import ApiError, to_api_error
from twostroke.server.http.responses import StreamedResponse, json_response
from twostroke.server.page.feed import EngineFeed
from twostroke.server.tenants.tenant import current_tenant

router = APIRouter()
STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class StaticFile:
    """A file of the page, ready to be sent."""

    media_type: str
    data: bytes
    packed: bytes
    tag: str

    @classmethod
    def read(cls, path: Path) -> "StaticFile":
        data = path.read_bytes()
        return cls(
            TYPES[path.suffix], data, gzip.compress(data, 9, mtime=0), f'"{hashlib.sha256(data).hexdigest()[:24]}"'
        )

    def response(self, http: HttpRequest) -> Response:
        """The response to a request for the file: compressed, or 304, as the client's headers allow."""
        headers = HEADERS | {"etag": self.tag, "vary": "accept, accept-encoding"}
        if http.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        packed = "gzip" in http.headers.get("accept-encoding", "")
        more = {"content-encoding": "gzip"} if packed else {}
        return Response(self.packed if packed else self.data, headers=headers | more, media_type=self.media_type)


@cache
def static_files() -> dict[str, StaticFile]:
    """The page's files by their paths, read once."""
    paths = (path for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES)
    return {path.relative_to(STATIC).as_posix(): StaticFile.read(path) for path in paths}


@router.get("/")
async def root(http: HttpRequest) -> Response:
    """The page for a browser; a line for others, such as Ollama's command line, which asks (HEAD) first of all."""
    if "text/html" in http.headers.get("accept", ""):
        return static_files()["index.html"].response(http)
    return Response("Twostroke is running", media_type="text/plain", headers={"vary": "accept"})


@router.get("/page/{name:path}")
async def file(name: str, http: HttpRequest) -> Response:
    """A file that the page loads."""
    if (found := static_files().get(name)) is None:
        raise ApiError(404, f"the page has no file {name:.60}", code="path_not_found")
    return found.response(http)


@router.get("/methods")
async def methods(engine: CurrentEngine) -> Response:
    """The techniques that this server can serve, with their parameters."""
    listed = [_described(METHODS[name]) for name in sorted(METHODS) if _runs(engine, METHODS[name]())]
    return json_response({"model": engine.name, "max_model_len": engine.llm.max_model_len, "methods": listed})


@router.get("/watch")
async def watch(
    http: HttpRequest, engine: CurrentEngine, replica: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """What the engine, or a replica, does, as server-sent events: "hello", then "steps" and "pages" (`feed.py`)."""
    current_tenant().require_admin()
    engine.require_engine_process()
    feeds: list[EngineFeed] = http.app.state.feeds
    if replica is None:  # the first that is not lost
        replica = next((i for i, one in enumerate(engine.served.parts) if one.alive), 0)
    if replica >= len(feeds):
        raise ApiError(404, f"there is no replica {replica}: there are {len(feeds)}, from 0 on", param="replica")
    if (failure := engine.served.parts[replica].failure) is not None:
        raise to_api_error(failure)
    return StreamedResponse(feeds[replica].messages(), "text/event-stream")


def _runs(engine: AsyncEngine, technique: Method) -> bool:
    try:
        engine.llm.require_method(technique)
    except InvalidRequest:
        return False
    return True


def _described(technique: type[Method]) -> dict[str, Any]:
    about = (technique.__doc__ or "").split("\n\n")[0]
    known = rules(technique)
    parameters = [_parameter(field, known.get(field.name)) for field in dataclasses.fields(technique)]
    return {"name": technique.name, "about": " ".join(about.split()), "parameters": parameters}


def _parameter(field: "dataclasses.Field[Any]", rule: Rule | None) -> dict[str, Any]:
    default = field.default_factory() if callable(field.default_factory) else field.default
    facts: dict[str, Any] = {"name": field.name, "default": default}
    if rule is not None:
        facts |= {"wanted": rule.wanted, "choices": rule.choices, "help": rule.help}
    return facts
