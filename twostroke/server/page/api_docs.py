"""`/docs`: every path with its fields, made of the OpenAPI description; one file without scripts, for offline use."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.server.page.routes import HEADERS

router = APIRouter()
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border-top: 1px solid #8884; padding: .4rem 0 }
summary { cursor: pointer }
b, code { font-family: ui-monospace, monospace; font-weight: normal }
b { display: inline-block; min-width: 4.5rem }
table { border-collapse: collapse; margin: .5rem 0 }
td { border-top: 1px solid #8883; padding: .2rem .8rem .2rem 0; vertical-align: top }
:root { color-scheme: light dark }
"""
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/docs", include_in_schema=False)
async def docs(http: HttpRequest) -> Response:
    """The description for people; `/openapi.json` is the one for programs."""
    page = "".join(_page(http.app.openapi()))
    return Response(page, headers=HEADERS | {"content-security-policy": POLICY}, media_type="text/html")


def _page(description: Mapping[str, Any]) -> Iterator[str]:
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    yield f"<h1>{title}</h1><p>For programs: <a href=openapi.json>openapi.json</a></p>"
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield from _operation(path, method, operation, description)


def _operation(path: str, method: str, operation: Mapping[str, Any], description: Mapping[str, Any]) -> Iterator[str]:
    about = operation.get("description", "")
    first = about.split("\n\n")[0].split(". ")[0]
    yield f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> {escape(first)}</summary>"
    yield f"<p>{escape(about)}</p>"
    rows = [(one["name"], one["schema"], one.get("required", False)) for one in operation.get("parameters", ())]
    content = operation.get("requestBody", {}).get("content", {})
    for kind in content.values():
        body = _resolved(kind.get("schema", {}), description)
        wanted = body.get("required", ())
        rows += [(name, schema, name in wanted) for name, schema in body.get("properties", {}).items()]
    if rows:
        yield "<table>" + "".join(_row(*row) for row in rows) + "</table>"
    yield "</details>"


def _row(name: str, schema: Mapping[str, Any], required: bool) -> str:
    default = f"default {schema['default']!r}" if schema.get("default") is not None else ""
    note = ". ".join(filter(None, ("required" if required else default, schema.get("description", ""))))
    return f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(schema))}<td>{escape(note)}"


def _kind(schema: Mapping[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if options := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(dict.fromkeys(_kind(one) for one in options if one.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", schema.get("const", "any")))


def _resolved(schema: Mapping[str, Any], description: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    return description["components"]["schemas"].get(schema["$ref"].rpartition("/")[2], {})
