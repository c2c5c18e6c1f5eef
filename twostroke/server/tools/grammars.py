"""Grammars for answers that may call tools: the arguments of a call satisfy the schema of its function."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.server.grammar import embedded_schema
from twostroke.server.tools.dialects import CLOSE, OPEN

MAX_CALLS = 16  # of an answer that must call: a small model may go on where it could end
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar(
    functions: Sequence[Mapping[str, Any]],  # OpenAI's function objects, those that may be called
    *,
    required: bool,  # nothing but calls, `MAX_CALLS` at most; otherwise text, and calls within it
    parallel: bool,  # more than one call
    marks: Iterable[int] = (),  # ids of special tokens that may stand in the text
    tagged: bool = False,  # `<tool_call>` in the text begins a call in JSON, of one of the functions
    # the schema of an answer that does not call. Then there is nothing but this answer, or calls.
    answer: Mapping[str, Any] | None = None,
    warnings: list[str] | None = None,  # takes a line for each keyword that is skipped, see `grammar.json_schema`
) -> str:
    """The grammar of an answer that may, or must, call some of these functions.

    A call that must be made is written as `<tool_call>`. In an answer that may call, any text is allowed; behind the
    name of a function and the word "arguments" or "parameters", in JSON, its arguments follow.

    Raises:
        InvalidRequest: a schema that cannot be followed is strict.
    """
    told = [] if warnings is None else warnings
    schemas = [f"f{place}: %json {json.dumps(_parameters(function, told))}" for place, function in enumerate(functions)]
    heads = [f"h{place}: {_literal(_head(function['name']))} f{place}" for place, function in enumerate(functions)]
    call = f"call: ({' | '.join(f'h{place}' for place in range(len(functions)))}) " + _literal("}\n" + CLOSE)
    calls = f"calls: {_literal(OPEN)} call" + (
        f' ("\\n" {_literal(OPEN)} call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    )
    if required:
        return "\n".join(["%llguidance {}", "start: calls", calls, call, *heads, *schemas])
    if answer is not None:
        return "\n".join(["%llguidance {}", *_answer_or_calls(answer, functions), calls, call, *heads, *schemas])
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


def _answer_or_calls(answer: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A call may be written as a bare object too, as many models do."""
    bare = [f"b{place}" for place in range(len(functions))]
    yield f"start: answer | calls | {' | '.join(bare)}"
    yield f"answer: %json {json.dumps(answer)}"
    for place, function in enumerate(functions):
        begins = _literal(f'{{"name": {json.dumps(function["name"])}, "')
        yield f'b{place}: {begins} ("arguments" | "parameters") {_literal(chr(34) + ": ")} f{place} "}}"'


def _head(name: str) -> str:
    return f'\n{{"name": {json.dumps(name)}, "arguments": '


def _trigger(name: str) -> str:
    """The pattern of a call up to its arguments."""
    return r'(.|\n)*"name":\s*"' + re.escape(name) + r'",\s*"(arguments|parameters)":'


def _parameters(function: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """The schema of a function's arguments, an object. Raises InvalidRequest for a strict one that it cannot follow."""
    skipped: list[str] = []
    strict = bool(function.get("strict"))
    try:
        schema = embedded_schema(function.get("parameters") or _NOTHING, strict, skipped, objects=True)
    except InvalidRequest as error:
        raise InvalidRequest(f"the parameters of {function['name']}: {error}") from None
    warnings += [f"the parameters of {function['name']}: {line}" for line in skipped]
    return schema


def _literal(text: str) -> str:
    return json.dumps(text)
