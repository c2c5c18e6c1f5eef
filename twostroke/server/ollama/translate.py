"""From Ollama's bodies to the server's own form of a conversation."""

import json
from collections.abc import Iterator
from typing import Any

from twostroke.server.errors import ApiError
from twostroke.server.ollama.schemas import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaMessage
from twostroke.server.openai import prepare_chat as conversation
from twostroke.server.openai.schemas.chat import ChatBody as Chat

# Ollama's defaults, which the model's own come before.
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}  # of options, and ours


def chat(body: OllamaChatBody, generation: dict[str, float]) -> Chat:
    """The body as chat completions have it. Raises ApiError."""
    fields = {"messages": list(_messages(body)), "tools": body.tools, **_common(body, generation)}
    return conversation.chat_body(fields | {"truncation": "auto" if body.truncate else "disabled"})


def prompt(body: OllamaGenerateBody, generation: dict[str, float]) -> Chat:
    """The same for a prompt, as one turn of a conversation. Raises ApiError."""
    _refuse_images(body.images, "images")
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    return conversation.chat_body({"messages": messages, **_common(body, generation)})


def _common(body: OllamaBody, generation: dict[str, float]) -> dict[str, Any]:
    given = {
        name: value for name in type(body.options).model_fields if (value := getattr(body.options, name)) is not None
    }
    if given.get("num_predict", 1) <= 0:
        del given["num_predict"]
    if given.get("seed", 0) < 0:  # -1 is a random one
        del given["seed"]
    if "stop" in given:
        given["stop"] = [stop for stop in given["stop"] if stop]
    if given.get("top_p") == 0:
        del given["top_p"]
        given["top_k"] = 1
    sampling = {NAMES.get(name, name): value for name, value in (_DEFAULTS | generation | given).items()}
    fields: dict[str, Any] = {
        **sampling,
        "model": body.model,
        "stream": body.stream,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else 0,
        "method": body.method,
        "cache_salt": body.cache_salt,
        "receipt": body.receipt,
    }
    if isinstance(body.think, bool):
        fields["thinking"] = {"type": "enabled" if body.think else "disabled"}
    else:
        fields["reasoning_effort"] = body.think
    match body.format:
        case None | "":
            pass
        case "json":
            fields["response_format"] = {"type": "json_object"}
        case dict(schema):
            form = {"name": "format", "schema": schema}  # Ollama passes over keywords that it does not know
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        case other:
            raise ApiError(400, f'format: must be "json" or a JSON schema, not {other!r:.60}', param="format")
    return fields


def _messages(body: OllamaChatBody) -> Iterator[dict[str, Any]]:
    """Convert to messages of chat completions. There a result names a call, and in Ollama a tool: calls get ids."""
    waiting: list[tuple[str, str]] = []  # (name, id) of calls without a result
    for index, message in enumerate(body.messages):
        _refuse_images(message.images, f"messages[{index}].images")
        made: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking and message.role == "assistant":
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            made["tool_calls"] = calls = list(_calls(message, index))
            waiting += [(call["function"]["name"], call["id"]) for call in calls]
        if message.role == "tool":
            name = message.tool_name or message.name
            place = next((i for i, (called, _) in enumerate(waiting) if name in (None, called)), None)
            found = ("", f"call_{index}") if place is None else waiting.pop(place)
            made |= {"tool_call_id": message.tool_call_id or found[1]}
            if name or found[0]:
                made["name"] = name or found[0]
        yield made


def _calls(message: OllamaMessage, index: int) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(message.tool_calls):
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.function.name, "arguments": text}
        yield {"id": call.id or f"call_{index}_{number}", "type": "function", "function": function}


def _refuse_images(images: list[Any], field: str) -> None:
    if images:
        raise ApiError(400, f"{field}: images are not supported, because the model reads text alone", param=field)
