"""From Anthropic's conversation to the server's own."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from twostroke.server.anthropic.schemas import (
    AnthropicMessage,
    AnthropicToolChoice,
    ContentBlock,
    MessagesBody,
    PromptBody,
)
from twostroke.server.errors import ApiError
from twostroke.server.openai.prepare_chat import chat_body, without_tracking
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.openai.schemas.content import CONTEXT, joined

# Blocks of earlier turns that a model here cannot have made: what others thought, and what Anthropic's own tools did.
_IGNORED_BLOCKS = ("thinking", "redacted_thinking", "server_tool_use", "container_upload", "compaction", "fallback")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "method", "priority", "timeout", "cache_salt", "receipt")
Content = str | list[Any]  # a text, or parts


def chat_from_anthropic(body: PromptBody, served: str) -> tuple[ChatBody, list[str]]:
    """The body as chat completions have it, and what of it was left out, for the client to read.

    Args:
        body: the request.
        served: the model's name, which every name that begins with "claude-" stands for.

    Raises:
        ApiError: for blocks that cannot be read.
    """
    warnings: list[str] = []
    fields: dict[str, Any] = {
        "model": served if body.model.startswith("claude-") else body.model,
        "messages": _messages(body),
        "tools": list(_tools(body, warnings)),
        **_choice(body.tool_choice),
        "thinking": body.thinking and body.thinking.model_dump(),
        "reasoning_effort": body.output_config.effort,
    }
    wanted = body.output_config.format or body.output_format
    if wanted is not None:
        schema = {"name": "output", "schema": wanted.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.messages[-1].role == "assistant":  # the answer goes on from it
        fields["continue_final_message"] = True
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream}
        fields["stop"] = [stop for stop in body.stop_sequences if stop]
        fields |= {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    return chat_body(fields), warnings


def _tools(body: PromptBody, warnings: list[str]) -> Iterator[dict[str, Any]]:
    for number, tool in enumerate(body.tools):
        if tool.input_schema is None:
            if tool.type == "custom":
                param = f"tools.{number}.input_schema"
                raise ApiError(400, f"{param}: give the schema of what the tool {tool.name} takes", param=param)
            warnings.append(f"the tool {tool.name} is left out: {tool.type} is not one that this server has")
            continue
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        function |= {"strict": True} if tool.strict else {}
        yield {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    named: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if named is None:
        if choice.name is None:
            raise ApiError(400, 'tool_choice: type "tool" needs the field name', param="tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": named, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _messages(body: PromptBody) -> list[dict[str, Any]]:
    """Convert the turns to messages of chat completions; texts of one role that follow each other are one message.

    A system message among the turns becomes text of the user's: many templates refuse one there, and moved to the
    front it would change the beginning of a prompt that is in the prefix index.
    """
    texts = [without_tracking(one) if isinstance(one, str) else one for one in _texts(body.system, "system")]
    turns = list(body.messages)
    while turns and turns[0].role == "system":
        texts += _texts(turns.pop(0).content, "messages.0.content")
    system = joined(texts, "\n\n")
    made: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for index, message in enumerate(turns, len(body.messages) - len(turns)):
        for one in _turn(message, f"messages.{index}", names):
            last = made[-1] if made else None
            if last is not None and one["role"] == last["role"] != "tool" and "tool_calls" not in last:
                made[-1] = {**last, **one, "content": joined((last["content"], one["content"]), "\n\n")}
            else:
                made.append(one)
    return made


def _turn(message: AnthropicMessage, where: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A turn as messages: the results of tools come before the text. `names` are those of earlier calls, by id."""
    texts: list[Content] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        place = f"{where}.content.{index}"
        if block.type == "thinking" and message.role == "assistant":
            thoughts.append(_field(block, "thinking", str, place))
        elif block.type == "tool_use" and message.role == "assistant":
            call = _call(block, place)
            names[call["id"]] = call["function"]["name"]
            calls.append(call)
        elif block.type == "tool_result" and message.role == "user":
            id = _field(block, "tool_use_id", str, place)
            text = joined(_texts(_inner(block, place), f"{place}.content"), "\n\n")
            if getattr(block, "is_error", False) is True and not text:
                text = "error"
            yield {"role": "tool", "tool_call_id": id, "content": text} | ({"name": names[id]} if id in names else {})
        else:
            texts += _texts([block], f"{where}.content", index)
    content = joined(texts, "\n\n")
    if message.role == "assistant":
        thought = {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
        yield {"role": "assistant", "content": content} | thought | ({"tool_calls": calls} if calls else {})
    elif content or not any(block.type == "tool_result" for block in message.content):
        yield {"role": "user", "content": content}


def _call(block: ContentBlock, place: str) -> dict[str, Any]:
    function = {
        "name": _field(block, "name", str, place),
        "arguments": json.dumps(_field(block, "input", dict, place), ensure_ascii=False),
    }
    return {"id": _field(block, "id", str, place), "type": "function", "function": function}


def _inner(block: ContentBlock, place: str) -> list[ContentBlock]:
    """The content of a tool's result: a text, blocks, or nothing."""
    content = getattr(block, "content", None) or []
    if isinstance(content, str):
        return [ContentBlock(type="text", text=content)]  # pyright: ignore[reportCallIssue]
    if not isinstance(content, list) or not all(
        isinstance(one, dict) and isinstance(one.get("type"), str) for one in content
    ):
        raise ApiError(400, f"{place}.content: must be a text or a list of blocks", param=f"{place}.content")
    return [ContentBlock.model_validate(one) for one in content]


def _texts(blocks: Sequence[ContentBlock], where: str, start: int = 0) -> list[Content]:
    """The text of some blocks. Raises ApiError for what a model of text cannot read."""
    return [text for index, block in enumerate(blocks, start) if (text := _text(block, f"{where}.{index}"))]


def _text(block: ContentBlock, place: str) -> Content | None:
    match block.type:
        case "context":
            return [{"type": CONTEXT, "name": _field(block, "name", str, place)}]
        case "text":
            return _field(block, "text", str, place)
        case "image":
            message = f"{place}: images are not supported, because the model reads text alone: leave them out"
            raise ApiError(400, message, param=place)
        case "document":
            return _document(block, place)
        case "search_result":
            inner = _texts(_inner(block, place), f"{place}.content")
            return joined([_field(block, "title", str, place), *inner], "\n\n")
        case "tool_reference":
            return _field(block, "tool_name", str, place)
        case kind if kind in _IGNORED_BLOCKS or (kind.endswith("_tool_result") and kind != "tool_result"):
            return None
        case kind:
            raise ApiError(400, f"{place}: a block of type {kind!r:.60} is not supported here", param=place)


def _document(block: ContentBlock, place: str) -> Content:
    source = _field(block, "source", dict, place)
    title = getattr(block, "title", None)
    match source.get("type"):
        case "text" if isinstance(source.get("data"), str):
            text: Content = source["data"]
        case "content" if isinstance(source.get("content"), str | list):
            inner = ContentBlock(type="text", content=source["content"])  # pyright: ignore[reportCallIssue]
            text = joined(_texts(_inner(inner, place), f"{place}.source.content"), "\n\n")
        case kind:
            raise ApiError(400, f"{place}: a document must be text, not {kind!r:.40}", param=place)
    return joined((title if isinstance(title, str) else "", text), "\n\n")


def _field(block: ContentBlock, name: str, kind: type, place: str) -> Any:
    value = getattr(block, name, None)
    if not isinstance(value, kind):
        wanted = "a text" if kind is str else "an object"
        raise ApiError(400, f"{place}.{name}: must be {wanted}", param=f"{place}.{name}")
    return value
