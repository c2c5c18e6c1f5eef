"""Render a conversation with tools for a model's chat template.

A template that knows tools gets the messages as they are. For any other, the tools are described in the system message,
a few calls are shown as turns, and calls and results become text. Some templates refuse what others ask for, so the
forms of a conversation are tried one after the other, from the one nearest to what the client sent. A conversation
without tools is never changed.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Protocol, TypeVar

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.chat_templates import REASONING
from twostroke.server.tools.dialects import CLOSE, OPEN

Message = Mapping[str, Any]
_INSTRUCTIONS = """You may call functions. These are their signatures:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments between tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_LISTED = "<tools>"
T = TypeVar("T")
_VALUES: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}
MAX_EXAMPLES = 3  # tools whose call is shown, each in some 40 tokens
_NONE = re.compile(r"content\S*\s+is\s+(?:not\s+)?none")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


class Template(Protocol):
    """What rendering needs of a tokenizer."""

    def template_for(self, tools: bool) -> str | None: ...

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None, **variables: Any) -> str: ...


def prompt_messages(
    tokenizer: Template, messages: Sequence[Message], functions: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[Sequence[Message], list[Message] | None]:
    """The messages and tools to give to the template. Raises InvalidRequest if it accepts no form of them.

    Args:
        tokenizer: it renders the template.
        messages: the conversation; a call's arguments are objects.
        functions: OpenAI's function objects, those that may be called.
        variables: further variables of the template.
    """
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    results = [_longest_word(message) for message in messages if message["role"] == "tool"]
    if not functions and not calls and not results:
        return messages, None
    # A template that does not know a role, or tools, may leave them out without a word.
    needed = Counter([*(function["name"] for function in functions), *calls, *set(results)])
    tools: list[Message] = [{"type": "function", "function": dict(function)} for function in functions]
    refusal: InvalidRequest | None = None
    for form, offered in _variants(tokenizer.template_for(bool(tools)), messages, tools):
        try:
            text = tokenizer.chat(form, tools=offered or None, **variables)
        except InvalidRequest as error:
            refusal = refusal or error
        else:
            told = not tools or offered or _LISTED in text
            if told and all(text.count(part) >= times for part, times in needed.items()):
                return form, offered or None
    raise refusal or InvalidRequest("the chat template leaves out the tools, or calls and their results")


def _variants(
    template: str | None, messages: Sequence[Message], tools: list[Message]
) -> Iterator[tuple[Sequence[Message], list[Message]]]:
    """The conversation and its tools: as the client sent them, then with ever more changes."""
    if template is not None and "tool" in template:
        own = [_with_content(message, _NONE.search(template) is not None) for message in messages]
        forms = (_same, _one_at_a_time, _merged), (_same, _short_ids), (_same, _written_arguments)
        for thoughts, order, ids, arguments in product((_same, _one_beside_calls), *forms):
            yield order(ids(arguments(thoughts(own)))), tools
    text = describe_tools(messages, tools)
    listed = int(bool(tools) and bool(text) and text[0]["role"] == "system")
    yield [*text[:listed], *_examples(tools), *text[listed:]], []
    yield text, []
    yield _merged(text), []
    yield _merged(_without_system(text)), []


def describe_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for a template without tools: a system message describes them, calls and results become text."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    text = _INSTRUCTIONS.format(tools="\n".join(_json(tool) for tool in tools))
    if plain and plain[0]["role"] == "system":
        first = {"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _examples(tools: Sequence[Message]) -> list[Message]:
    """A turn for each of the first tools. Small models call after an example, and not by the description alone."""
    made: list[Message] = []
    for tool in tools[:MAX_EXAMPLES]:
        function = tool["function"]
        schema = function.get("parameters") or {}
        properties, required = _part(schema, "properties", dict), _part(schema, "required", list)
        known = (name for name in required if isinstance(name, str) and name in properties)
        arguments = {name: _example(properties[name]) for name in known}
        asked = " ".join([function.get("description") or function["name"], *map(_json, arguments.values())])
        call = {"function": {"name": function["name"], "arguments": arguments}}
        made.append({"role": "user", "content": asked})
        made.append(_as_text({"role": "assistant", "content": "", "tool_calls": [call]}))
    return made


def _example(schema: Any) -> Any:
    """A value that a simple schema allows, or a text."""
    schema = schema if isinstance(schema, Mapping) else {}
    if values := _part(schema, "enum", list):
        return values[0]
    return _VALUES.get(_part(schema, "type", str), "abc")


def _part(schema: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """A part of a schema that nobody has checked: empty where it is of another kind."""
    return value if isinstance(value := schema.get(key), kind) else kind()


def _as_text(message: Message) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [f"{OPEN}\n{_json(_call(call))}\n{CLOSE}" for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])}


def _call(call: Message) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or {}}


def _one_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """Several calls of one message as a message each, with its result: Llama 3.1's template takes one at a time."""
    made: list[Message] = []
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    placed: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if id(message) not in placed:
                made.append(message)
            continue
        for number, call in enumerate(calls):
            made.append({**message, "tool_calls": [call]} | ({"content": ""} if number else {}))
            if (result := results.get(call.get("id"))) is not None:
                made.append(result)
                placed.add(id(result))
    return made


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message, for templates in which roles must alternate."""
    made: list[Message] = []
    for message in messages:
        before = made[-1] if made else None
        if before is not None and before["role"] == message["role"] and not (before.keys() & {"tool_calls"}):
            texts = [text for text in (before.get("content"), message.get("content")) if text]
            made[-1] = {**before, **message, "content": "\n\n".join(texts)}
        else:
            made.append(message)
    return made


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """System messages as the beginning of the user's message that follows."""
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in messages]


def _one_beside_calls(messages: Sequence[Message]) -> list[Message]:
    """A message that calls with its text or its thought, since the template of gpt-oss refuses both."""
    return [
        {key: value for key, value in message.items() if key not in REASONING}
        if message.get("tool_calls") and message.get("content")
        else message
        for message in messages
    ]


def _same(messages: Sequence[Message]) -> Sequence[Message]:
    return messages


def _with_content(message: Message, none: bool) -> Message:
    """A message that only calls: templates that ask whether its content is none take it for text otherwise."""
    if not message.get("tool_calls") or message.get("content"):
        return message
    return {**message, "content": None if none else ""}


def _short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls as nine letters and digits, which Mistral's templates require."""
    made: list[Message] = []
    for message in messages:
        changed: dict[str, Any] = {}
        if message.get("tool_calls"):
            changed["tool_calls"] = [{**call, "id": short_id(call.get("id") or "")} for call in message["tool_calls"]]
        if message["role"] == "tool":
            changed["tool_call_id"] = short_id(message.get("tool_call_id") or "")
        made.append({**message, **changed})
    return made


def short_id(id: str) -> str:
    """The id itself if it has nine letters and digits, else nine that depend on it alone."""
    return id if _SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _written_arguments(messages: Sequence[Message]) -> list[Message]:
    """Arguments as JSON texts, which DeepSeek's templates put together with other text."""
    made: list[Message] = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _json(call["function"].get("arguments"))}}
            for call in message.get("tool_calls") or ()
        ]
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _longest_word(message: Message) -> str:
    """A part of a result that no template changes."""
    return max(re.findall(r"\w+", message.get("content") or "") or [""], key=len)
