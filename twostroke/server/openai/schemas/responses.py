"""The body of /v1/responses: text in, text out."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from twostroke.server.openai.schemas import others
from twostroke.server.openai.schemas.chat import Content, Text
from twostroke.server.openai.schemas.common import GenerateBody, Lenient
from twostroke.server.openai.schemas.lenient import Neutral, whole
from twostroke.server.openai.schemas.sampling import described


class InputMessage(Content):
    """One turn of the input."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"id", "phase", "status"})
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class TextFormat(Lenient):
    """The format that the text must have."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"description"})
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "schema"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = False

    @model_validator(mode="after")
    def _complete(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError('type "json_schema" needs the field schema')
        return self


class TextOptions(Lenient):
    """OpenAI's `text` object."""

    WITHOUT_EFFECT: ClassVar[Neutral] = {"verbosity": ("medium",)}
    format: TextFormat = TextFormat()


def _messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(GenerateBody):
    """Answer an input. Answers are not stored, so one cannot be continued by its id."""

    LIMIT: ClassVar[str] = "max_output_tokens"
    ALIASES: ClassVar[Mapping[str, str]] = others.ALIASES | {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
    }
    HARMLESS: ClassVar[frozenset[str]] = others.HARMLESS | {
        "include",
        "parallel_tool_calls",
        "store",
        "tool_choice",
        "truncation",
    }
    WITHOUT_EFFECT: ClassVar[Neutral] = others.WITHOUT_EFFECT | {
        "reasoning": ({},),
        "reasoning_effort": (),
        "top_logprobs": (0,),
    }
    UNSUPPORTED: ClassVar[Neutral] = others.UNSUPPORTED | {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
    }
    input: Annotated[list[InputMessage], BeforeValidator(_messages), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, described("max_tokens", ge=1), BeforeValidator(whole)] = None
    text: TextOptions = TextOptions()
    metadata: dict[str, str] = Field(default_factory=dict)
    previous_response_id: str | None = None
    tools: list[Any] = Field(default_factory=list)
