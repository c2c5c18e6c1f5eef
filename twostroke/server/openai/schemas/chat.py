"""The body of /v1/chat/completions."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from twostroke.server.openai.schemas.common import GenerateBody, Lenient
from twostroke.server.openai.schemas.sampling import described


def _text(value: Any) -> Any:
    """Content as a text: parts are joined."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"a part of content must be of type text, not {kind!r:.40}")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"a part of type {kind} must have a text")
        texts.append(text)
    return "".join(texts)


Text = Annotated[str, BeforeValidator(_text)]


class CalledFunction(Lenient):
    """A function that an assistant called in an earlier turn."""

    name: str
    arguments: str = "{}"


class ToolCall(Lenient):
    """A call in an assistant's message."""

    id: str = ""
    function: CalledFunction


class Message(Lenient):
    """One turn. `developer` is a system message under its newer name."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: arguments are objects there, texts in the API."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self.content or ""
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _object(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class Function(Lenient):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude_none=True)


class Tool(Lenient):
    """OpenAI's wrapper around a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Lenient):
    """The function that must be called."""

    name: str


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    named = value.get("function") if isinstance(value, dict) else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise ValueError('"none", "auto", "required", or {"type": "function", "function": {"name": ...}}')
    return NamedFunction(name=named["name"])


class ChatBody(GenerateBody):
    """Answer a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int | None, described("max_tokens")] = None
    max_completion_tokens: Annotated[int | None, described("max_tokens")] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, described("logprobs", le=20)] = 0
    tools: Annotated[list[Tool], Field(max_length=1024)] = Field(default_factory=list)
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice)] = "auto"  # a text, or a NamedFunction
    parallel_tool_calls: bool = True
    functions: Any = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def must_call(self) -> bool:
        """Whether an answer must call a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedFunction)

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls: a function that must be called is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedFunction)

    @property
    def callable_functions(self) -> list[Function]:
        """The functions that the tool choice allows to be called."""
        if self.tool_choice == "none":
            return []
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else None
        return [tool.function for tool in self.tools if named in (None, tool.function.name)]
