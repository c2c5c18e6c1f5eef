"""Fields of OpenAI, vLLM, llama.cpp, SGLang and others: which of them mean one of ours, nothing, or more than we do."""

import json
import tomllib
from importlib.resources import files
from typing import Any

from twostroke.server.openai.schemas.base_model import Neutral, set_alias

_FIELDS = tomllib.loads((files(__package__ or "") / "other_servers.toml").read_text(encoding="utf-8"))
ALIASES: dict[str, str] = _FIELDS["aliases"]
HARMLESS = frozenset[str](_FIELDS["harmless"])
WITHOUT_EFFECT: Neutral = {name: tuple(values) for name, values in _FIELDS["without_effect"].items()}
UNSUPPORTED: Neutral = {name: tuple(values) for name, values in _FIELDS["unsupported"].items()}

_STRUCTURED = {"regex": "regex", "choice": "choice", "grammar": "grammar", "json": "response_format"}


def translated(given: dict[str, Any], limit: str) -> dict[str, Any]:
    """The fields of a generating body, with the forms that other servers have. Raises ValueError, which names one.

    `limit` is the body's name for the most tokens of an answer.
    """
    if (format := given.get("response_format")) and isinstance(format, dict):
        kind = format.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if kind in ("grammar", "regex"):  # Fireworks, Friendli
            given.pop("response_format")
            text = next((format[key] for key in (kind, "pattern", "schema", "value") if key in format), None)  # pyright: ignore
            set_alias(given, kind, text, "response_format")
    for alias in ("guided_json", "json_schema"):
        if alias in given:
            set_alias(given, "response_format", _json(given.pop(alias), alias), alias)
    if isinstance(given.get("grammar"), dict):  # Text Generation Inference
        _structured(given, {str(given["grammar"].get("type")): given.pop("grammar").get("value")}, "grammar")
    if "structured_outputs" in given:
        asked = given.pop("structured_outputs")
        if not isinstance(asked, dict):
            raise ValueError('structured_outputs: an object, such as {"regex": ...}')
        _structured(given, {key: value for key, value in asked.items() if value is not None}, "structured_outputs")  # pyright: ignore
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if given.get(name) == -1:  # LM Studio: all that the context allows
            given[name] = None
    if "n_predict" in given:
        most = given.pop("n_predict")
        set_alias(given, limit, None if most in (-1, -2) else most, "n_predict")
    if given.get("top_p") == 0 and not isinstance(given["top_p"], bool):  # only the most likely token is left
        given |= {"top_p": 1.0, "temperature": 0.0}
    return given


def _structured(given: dict[str, Any], asked: dict[Any, Any], where: str) -> None:
    """Put what vLLM's `structured_outputs` has into our fields."""
    for name in ("disable_any_whitespace", "disable_fallback", "disable_additional_properties"):
        asked.pop(name, None)  # our JSON has one layout
    if asked.pop("json_object", False):
        set_alias(given, "response_format", {"type": "json_object"}, where)
    for name, value in asked.items():
        if name not in _STRUCTURED:
            raise ValueError(f"{where}: {name!s:.60} is not supported here: json, regex, choice or grammar")
        set_alias(given, _STRUCTURED[name], _json(value, where) if name == "json" else value, where)


def _json(schema: Any, where: str) -> dict[str, Any]:
    """A response format with this schema: an object, or a text in JSON."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            raise ValueError(f"{where}: not JSON") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{where}: a JSON schema must be an object")
    return {"type": "json_schema", "json_schema": {"name": where, "schema": schema}}
