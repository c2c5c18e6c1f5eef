"""Tool calls: how tools are described to a model, and the grammar that its calls follow.

Calls are written as Qwen and Hermes models learned it: `<tool_call>`, a JSON object with "name" and "arguments",
`</tool_call>`. A template that knows tools describes them itself; for any other template, a system message does.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.server.grammar import with_options

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_INSTRUCTIONS = """You may call functions. These are their signatures:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments between tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template describes tools by itself, in the form that is parsed here."""
    return template is not None and "tools" in template and OPEN in template


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template without tools: a system message describes them, calls and results become text."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if plain and plain[0]["role"] == "system":
        first = {"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [f"{OPEN}\n{json.dumps(call['function'])}\n{CLOSE}" for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])}


def grammar(functions: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool) -> str:
    """The grammar of an answer that may, or must, call some of these functions.

    Args:
        functions: OpenAI's function objects, those that may be called.
        required: nothing but calls; otherwise text, and calls within it.
        parallel: more than one call.
    """
    rules = [
        f"f{place}: {_literal(_head(function['name']))} %json {json.dumps(_parameters(function))}"
        for place, function in enumerate(functions)
    ]
    names = " | ".join(f"f{place}" for place in range(len(functions)))
    call = f"call: ({names}) {_literal('}' + chr(10) + CLOSE)}"
    if required:
        more = f' ("\\n" {_literal(OPEN)} call)*' if parallel else ""
        start = [f"start: {_literal(OPEN)} call{more}"]
    else:
        start = ["start: said* TEXT" if parallel else "start: said | TEXT", "said: open call"]
        start += [f"open[lazy]: TEXT {_literal(OPEN)}", r"TEXT: /(.|\n)*/"]
    return "\n".join(["%llguidance {}", *start, call, *rules])


def _head(name: str) -> str:
    return f'\n{{"name": {json.dumps(name)}, "arguments": '


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    return with_options(schema, strict=bool(function.get("strict")))


def _literal(text: str) -> str:
    return json.dumps(text)
