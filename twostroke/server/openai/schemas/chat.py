"""The body of /v1/chat/completions."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from twostroke.models.checkpoints.chat_templates import variables_of
from twostroke.server.openai.schemas import other_servers
from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, whole_number
from twostroke.server.openai.schemas.common import ChatFields, GenerateBody, described
from twostroke.server.openai.schemas.content import NAME, MessageWithParts
from twostroke.server.openai.schemas.reasoning import UNUSED, ReasoningFields


class CalledFunction(LenientModel):
    """A function that an assistant called in an earlier turn."""

    name: str
    arguments: str | dict[str, Any] = "{}"  # a text in OpenAI's API, an object in other servers'


class ToolCall(LenientModel):
    """A call in an assistant's message."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"index", "type"})
    id: str = ""
    function: CalledFunction


class ChatMessage(MessageWithParts):
    """One turn. `developer` is a system message under its newer name."""

    ALIASES: ClassVar[Mapping[str, str]] = {"reasoning": "reasoning_content"}
    HARMLESS: ClassVar[frozenset[str]] = frozenset({"annotations", "audio", "cache_control", "id", "refusal", "status"})
    UNSUPPORTED: ClassVar[Neutral] = {"function_call": ()}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template: arguments are objects there, texts in the API."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self.marked(self.content or "")
        for key in ("name", "tool_call_id", "reasoning_content"):
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


def _object(arguments: str | dict[str, Any]) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class FunctionDefinition(LenientModel):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: Callable[[Any], Self]) -> Self:
        function = handler(data)
        function._sent = dict(data) if isinstance(data, dict) else function.model_dump(exclude_unset=True)
        return function

    def for_template(self) -> dict[str, Any]:
        """The function as the client sent it: models know tools by the text that transformers' templates make."""
        return self._sent


class ChatTool(LenientModel):
    """OpenAI's wrapper around a function."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(LenientModel):
    """The function that must be called."""

    name: str


class AllowedFunctions(LenientModel):
    """Some of the tools, which may or must be called."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]

    @property
    def functions(self) -> set[str]:
        """The names of the functions."""
        functions = (tool.get("function") for tool in self.tools)
        return {str(one.get("name")) for one in functions if isinstance(one, dict)}


def _tool_choice(value: Any) -> Any:
    """OpenAI's forms; a name beside the type, as its responses have it; Mistral's "any"."""
    match value:
        case "none" | "auto" | "required":
            return value
        case "any":
            return "required"
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return AllowedFunctions.model_validate(allowed)
        case {"function": {"name": str()} as named}:
            return NamedFunction.model_validate(named)
        case {"type": "function", "name": str(name)}:
            return NamedFunction(name=name)
        case _:
            raise ValueError('"none", "auto", "required", or {"type": "function", "function": {"name": ...}}')


class ChatPrompt(ReasoningFields):
    """Messages, and what else makes a prompt of them through the chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[ChatTool], Field(max_length=1024)] = Field(default_factory=list)
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice)] = "auto"  # a text, NamedFunction or AllowedFunctions
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise ValueError("continue_final_message: not together with add_generation_prompt: leave one out")
            self.add_generation_prompt = False
        return self

    @property
    def must_call(self) -> bool:
        """Whether an answer must call a function."""
        choice = self.tool_choice
        if isinstance(choice, AllowedFunctions):
            return choice.mode == "required"
        return choice == "required" or isinstance(choice, NamedFunction)

    @property
    def callable_functions(self) -> list[FunctionDefinition]:
        """The functions that the tool choice allows to be called."""
        if self.tool_choice == "none":
            return []
        functions = [tool.function for tool in self.tools]
        match self.tool_choice:
            case NamedFunction(name=name):
                return [one for one in functions if one.name == name]
            case AllowedFunctions(functions=names):
                return [one for one in functions if one.name in names]
            case _:
                return functions

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the template."""
        given = {"documents": self.documents, "reasoning_effort": self.effort}
        named = {name: value for name, value in given.items() if value is not None}
        return self.switches | named | self.chat_template_kwargs

    def unused(self, template: str | None, thinks: bool) -> list[str]:
        """A sentence for each variable that the template does not read, and for thoughts of a model that has none."""
        read, own, told = variables_of(template or ""), type(self).model_fields, list[str]()
        for name in self.variables:
            if name in read or (name in self.switches and name not in self.chat_template_kwargs):
                continue
            place = name if name in own else f"chat_template_kwargs.{name:.60}"
            effort = name == "reasoning_effort" and name not in self.chat_template_kwargs
            told += self.without_levels(read) if effort else [f"{place} {UNUSED}"]
        return [*told, *([] if thinks else self.without_thoughts())]


def _flag_or_name(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and re.fullmatch(NAME, value)):
        return value
    raise ValueError("true, or a name of 1 to 128 letters, digits, _, . and -")


class ChatBody(ChatFields, ChatPrompt, GenerateBody):
    """Answer a conversation."""

    UNSUPPORTED: ClassVar[Neutral] = other_servers.UNSUPPORTED | {
        "add_special_tokens": (False,),  # the template alone adds them
        "best_of": (1,),
        "echo": (False,),
        "functions": ([],),
        "return_tokens_as_token_ids": (False,),
    }
    max_tokens: Annotated[int | None, described("max_tokens", ge=1), BeforeValidator(whole_number)] = None
    max_completion_tokens: Annotated[int | None, described("max_tokens", ge=1), BeforeValidator(whole_number)] = None
    logprobs: bool = False
    return_token_ids: bool = False  # the answer's, beside its text; /tokenize has the prompt's
    # Put the conversation with its answer under a name, this one or a new one: a context to go on from and to fork.
    keep: Annotated[Any, BeforeValidator(_flag_or_name)] = False
    messages: list[ChatMessage] = Field(default_factory=list)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.messages and self.context is None:
            raise ValueError("messages: give at least one, or a context that ends with an answer to go on with")
        if self.keep and self.n > 1:
            raise ValueError("keep: this is for one answer: leave out n")
        return self

    @property
    def max_answer_tokens(self) -> int | None:
        """The most tokens of an answer, under either of its names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls: a function that must be called is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedFunction)
