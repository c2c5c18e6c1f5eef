"""The grammar that an answer follows where tools are offered: the arguments of a call are what its schema says."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import llguidance

from twostroke.errors import InvalidRequest
from twostroke.server.grammar import with_options
from twostroke.server.tools.dialects import CLOSE, OPEN

ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar(
    functions: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    marks: Iterable[int] = (),
    warnings: list[str] | None = None,
) -> str:
    """The grammar of an answer that may, or must, call some of these functions.

    A call that must be made is written as `<tool_call>`. In an answer that may call, any text is allowed; behind the
    name of a function and the word "arguments" or "parameters", in JSON, its arguments follow.

    Args:
        functions: OpenAI's function objects, those that may be called.
        required: nothing but calls; otherwise text, and calls within it.
        parallel: more than one call.
        marks: ids of special tokens that may stand in the text.
        warnings: takes a line for each schema that cannot be followed; the arguments are any object then.

    Raises:
        InvalidRequest: a schema that cannot be followed is strict.
    """
    told = [] if warnings is None else warnings
    schemas = [f"f{place}: %json {json.dumps(_parameters(function, told))}" for place, function in enumerate(functions)]
    if required:
        call = f"{_literal(OPEN)} ({' | '.join(f'c{place}' for place in range(len(functions)))}) "
        call += _literal("}\n" + CLOSE)
        more = ' ("\\n" call)*' if parallel else ""
        heads = [f"c{place}: {_literal(_head(function['name']))} f{place}" for place, function in enumerate(functions)]
        return "\n".join(["%llguidance {}", f"start: call{more}", f"call: {call}", *heads, *schemas])
    some = " | ".join(f"c{place}" for place in range(len(functions)))
    said = [f"c{place}: o{place} SPACE f{place}" for place in range(len(functions))]
    opens = [f"o{place}[lazy]: /{_trigger(function['name'])}/" for place, function in enumerate(functions)]
    special = " | ".join(f"<[{id}]>" for id in sorted(marks))
    mark = [f"mark: TEXT ({special})"] if special else []
    if parallel:
        start = f"start: {'(said | mark)*' if special else 'said*'} TEXT"
    else:
        start = f"start: {'mark* ' if special else ''}(said REST | TEXT)"
    terminals = [r"TEXT: /(.|\n)*/", "SPACE: / ?/", r"REST: /[\s}\]`]*(<\/tool_call>)?[\s`]*/"]
    return "\n".join(["%llguidance {}", start, f"said: {some}", *mark, *said, *opens, *schemas, *terminals])


def _head(name: str) -> str:
    return f'\n{{"name": {json.dumps(name)}, "arguments": '


def _trigger(name: str) -> str:
    """The pattern of a call up to its arguments."""
    return r'(.|\n)*"name":\s*"' + re.escape(name) + r'",\s*"(arguments|parameters)":'


def _parameters(function: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """The schema of a function's arguments, if a grammar can follow it."""
    strict = bool(function.get("strict"))
    schema = with_options(function.get("parameters") or _NOTHING, strict=strict)
    text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text)
    if not failed:
        return schema
    reason = f"the parameters of {function['name']} cannot be followed: {' '.join(messages[0].split())[:200]}"
    if strict:
        raise InvalidRequest(reason)
    warnings.append(f"{reason}; its arguments are any object")
    return with_options(ANY_OBJECT, strict=False)


def _literal(text: str) -> str:
    return json.dumps(text)
