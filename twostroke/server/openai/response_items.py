"""The items of /v1/responses as a conversation: messages, calls and their results, and the tools that may be called."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.server.errors import ApiError
from twostroke.server.openai.prepare_chat import chat_body
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.openai.schemas.common import ChatFields, GenerateBody
from twostroke.server.openai.schemas.content import CONTEXT, joined
from twostroke.server.openai.schemas.reasoning import ReasoningFields
from twostroke.server.openai.schemas.responses import ResponsesBody

Item = Mapping[str, Any]
_IGNORED_ITEMS = ("compaction", "compaction_trigger")  # items that no model here makes or needs
# The argument of a custom tool, which takes a text, where functions take objects.
_CUSTOM_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class OfferedTool:
    """How a tool is called: `custom` takes a text; a `namespace` is told back with each call."""

    function: dict[str, Any]
    custom: bool = False
    namespace: str | None = None


def chat_from_items(
    body: ResponsesBody,  # the request
    items: Sequence[Item],  # its input, with references resolved
    history: Sequence[Item],  # the items of earlier responses, which come before
    offers: Mapping[str, OfferedTool],  # the tools by name (`offered`)
    warnings: list[str],  # where to tell
) -> ChatBody:
    """The body as chat completions have it. What is left out is told in `warnings`.

    Raises:
        ApiError: for items or choices that cannot be read.
    """
    shared = GenerateBody.model_fields | ReasoningFields.model_fields | ChatFields.model_fields
    given = body.model_fields_set & shared.keys() - {"stream_options"}
    names, choice = _choice(body.tool_choice, offers, warnings)
    fields: dict[str, Any] = {name: getattr(body, name) for name in given} | {
        "messages": _with_instructions(body, [*_messages(history, []), *_messages(items, warnings)]),
        "tools": [{"type": "function", "function": offers[name].function} for name in names],
        "tool_choice": choice,
        "chat_template_kwargs": body.chat_template_kwargs,
        "logprobs": body.wants_logprobs,
    }
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    wanted = body.text.format
    if wanted.type != "text":
        if body.response_format is not None:
            raise ApiError(400, "text cannot be combined with response_format", param="text")
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        fields["response_format"] = {"type": wanted.type} | (
            {"json_schema": schema} if wanted.type == "json_schema" else {}
        )
    if not fields["messages"]:
        raise ApiError(400, "input: there is no message that the model could read", param="input")
    return chat_body(fields)


def offered_tools(tools: Sequence[Item], warnings: list[str]) -> dict[str, OfferedTool]:
    """The tools that a client executes, by name. Those that OpenAI's servers execute are told in `warnings`."""
    found: dict[str, OfferedTool] = {}
    for index, tool in enumerate(tools):
        match tool.get("type"):
            case "function":
                offer = OfferedTool(_function(tool, f"tools[{index}]"))
            case "custom":
                plain = {**tool, "parameters": _CUSTOM_TOOL_SCHEMA}
                offer = OfferedTool(_function(plain, f"tools[{index}]"), custom=True)
            case "namespace" if isinstance(tool.get("tools"), list) and isinstance(tool.get("name"), str):
                inner = offered_tools(tool["tools"], warnings)
                found |= {name: OfferedTool(one.function, one.custom, tool["name"]) for name, one in inner.items()}
                continue
            case str(kind):
                warnings.append(f"a tool of type {kind:.60} is left out: this server does not have it")
                continue
            case kind:
                raise ApiError(400, f"tools[{index}].type: must be a text, not {kind!r:.40}", param="tools")
        found[offer.function["name"]] = offer
    return found


def _function(tool: Item, where: str) -> dict[str, Any]:
    """A function as chat completions have it; a tool may have it inside, as it is there."""
    inner = tool.get("function")
    facts = inner if isinstance(inner, dict) else tool
    if not isinstance(facts.get("name"), str):
        raise ApiError(400, f"{where}.name: must be a text", param=f"{where}.name")
    kept = ("name", "description", "parameters", "strict")
    return {key: value for key, value in facts.items() if key in kept and value is not None}


def _choice(choice: Any, offers: Mapping[str, OfferedTool], warnings: list[str]) -> tuple[list[str], Any]:
    """The names that may be called, and the choice as chat completions have it."""
    everything = list(offers)
    match choice:
        case "none" | "auto":
            return everything, choice
        case "required":
            return everything, choice
        case {"type": "function" | "custom", "name": str(name)}:
            if name not in offers:
                raise ApiError(400, f"tool_choice: tools has no {name!r:.80}", param="tool_choice")
            return everything, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(allowed)}:
            listed = {tool.get("name") for tool in allowed if isinstance(tool, dict)}
            names = [name for name in everything if name in listed]
            mode = choice.get("mode", "auto")
            if mode not in ("auto", "required"):
                raise ApiError(400, 'tool_choice.mode: must be "auto" or "required"', param="tool_choice.mode")
            return names, mode
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            warnings.append(f"tool_choice asks for {kind:.60}, which this server does not have: auto is used")
            return everything, "auto"
        case _:
            message = '"none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
            raise ApiError(400, f"tool_choice: must be {message}", param="tool_choice")


def _with_instructions(body: ResponsesBody, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message from the instructions and the system messages at the beginning: templates have one place."""
    begun = next((i for i, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    text = joined([body.instructions or "", *(one["content"] for one in messages[:begun])], "\n\n")
    return [*([{"role": "system", "content": text}] if text else []), *messages[begun:]]


def _messages(items: Sequence[Item], warnings: list[str]) -> list[dict[str, Any]]:
    """Convert to messages of chat completions.

    An assistant's thought, the text and the calls that follow it are one message.
    """
    made: list[dict[str, Any]] = []
    thought: dict[str, str] = {}  # for the assistant's message that comes next
    for index, item in enumerate(items):
        match item.get("type"):
            case "reasoning":
                thought = _thought(item) or thought
            case "message":
                message = _message(item, f"input[{index}]")
                made.append(message | (thought if message["role"] == "assistant" else {}))
                thought = {}
            case "function_call" | "custom_tool_call" as kind:
                call = _call(item, kind, f"input[{index}]")
                if not made or made[-1]["role"] != "assistant" or thought:
                    made.append({"role": "assistant", "content": "", **thought})
                    thought = {}
                made[-1]["tool_calls"] = [*made[-1].get("tool_calls", ()), call]
            case "function_call_output" | "custom_tool_call_output":
                id = _text_field(item, "call_id", f"input[{index}]")
                content = _content(item.get("output"), f"input[{index}].output")
                made.append({"role": "tool", "tool_call_id": id, "content": content})
            case kind if kind in _IGNORED_ITEMS:
                continue
            case str(kind):
                warnings.append(f"an item of type {kind:.60} is left out of the input")
            case kind:
                raise ApiError(400, f"input[{index}].type: must be a text, not {kind!r:.40}", param=f"input[{index}]")
    return made


def _thought(item: Item) -> dict[str, str]:
    """The thought of an item that a model here has made: other servers' have a summary, or cannot be read."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []  # pyright: ignore
    thought = "".join(text for text in texts if isinstance(text, str))
    return {"reasoning_content": thought} if thought else {}


def _message(item: Item, where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        message = f'{where}.role: must be "system", "developer", "user" or "assistant", not {role!r:.40}'
        raise ApiError(400, message, param=f"{where}.role")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _call(item: Item, kind: str, where: str) -> dict[str, Any]:
    if kind == "function_call":
        arguments = _text_field(item, "arguments", where)
    else:
        arguments = json.dumps({"input": _text_field(item, "input", where)}, ensure_ascii=False)
    function = {"name": _text_field(item, "name", where), "arguments": arguments}
    return {"id": _text_field(item, "call_id", where), "type": "function", "function": function}


def _content(content: Any, where: str) -> str | list[Any]:
    """A text or parts of text, as one text; parts if there are contexts among them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: must be a text or a list of parts", param=where)
    texts: list[str | list[Any]] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == CONTEXT:
            texts.append([{"type": CONTEXT, "name": _text_field(part, "name", f"{where}[{index}]")}])
            continue
        if kind not in ("input_text", "output_text", "text", "refusal"):
            message = f"{where}[{index}]: the model reads text alone, so a part of type {kind!r:.40} is not supported"
            raise ApiError(400, message, param=f"{where}[{index}]")
        texts.append(_text_field(part, "refusal" if kind == "refusal" else "text", f"{where}[{index}]"))
    return joined(texts)


def _text_field(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name}: must be a text", param=f"{where}.{name}")
    return value
