"""The grammar that an answer follows where tools are offered: the arguments of a call are what its schema says."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.server.grammar import with_options
from twostroke.server.tools.dialects import CLOSE, OPEN

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar(
    functions: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    marks: Iterable[int] = (),
    tagged: bool = False,
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
        tagged: `<tool_call>` in the text begins a call in JSON, of one of the functions.
        warnings: takes a line for each keyword that is skipped, see `grammar.json_schema`.

    Raises:
        InvalidRequest: a schema that cannot be followed is strict.
    """
    told = [] if warnings is None else warnings
    schemas = [f"f{place}: %json {json.dumps(_parameters(function, told))}" for place, function in enumerate(functions)]
    heads = [f"h{place}: {_literal(_head(function['name']))} f{place}" for place, function in enumerate(functions)]
    call = f"call: ({' | '.join(f'h{place}' for place in range(len(functions)))}) " + _literal("}\n" + CLOSE)
    if required:
        more = f' ("\\n" {_literal(OPEN)} call)*' if parallel else ""
        return "\n".join(["%llguidance {}", f"start: {_literal(OPEN)} call{more}", call, *heads, *schemas])
    some = " | ".join([*(f"c{place}" for place in range(len(functions))), *(["open call"] if tagged else [])])
    said = [f"c{place}: o{place} SPACE f{place}" for place in range(len(functions))]
    opens = [f"o{place}[lazy]: /{_trigger(function['name'])}/" for place, function in enumerate(functions)]
    special = " | ".join(f"<[{id}]>" for id in sorted(marks))
    mark = [f"mark: TEXT ({special})"] if special else []
    if parallel:
        start = f"start: {'(said | mark)*' if special else 'said*'} TEXT"
    else:
        start = f"start: {'mark* ' if special else ''}(said REST | TEXT)"
    terminals = [r"TEXT: /(.|\n)*/", "SPACE: / ?/", r"REST: /[\s}\]`]*(<\/tool_call>)?[\s`]*/"]
    if tagged:
        opens += [rf"open[lazy]: /(.|\n)*{OPEN}/", call, *heads]
    return "\n".join(["%llguidance {}", start, f"said: {some}", *mark, *said, *opens, *schemas, *terminals])


def _head(name: str) -> str:
    return f'\n{{"name": {json.dumps(name)}, "arguments": '


def _trigger(name: str) -> str:
    """The pattern of a call up to its arguments."""
    return r'(.|\n)*"name":\s*"' + re.escape(name) + r'",\s*"(arguments|parameters)":'


def _parameters(function: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """The schema of a function's arguments. Raises InvalidRequest for one that is strict and cannot be followed."""
    skipped: list[str] = []
    try:
        schema = with_options(function.get("parameters") or _NOTHING, bool(function.get("strict")), skipped)
    except InvalidRequest as error:
        raise InvalidRequest(f"the parameters of {function['name']}: {error}") from None
    warnings += [f"the parameters of {function['name']}: {line}" for line in skipped]
    return schema


def _literal(text: str) -> str:
    return json.dumps(text)
