"""The body of /v1/responses: text in, text out."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from twostroke.server.openai.schemas.chat import Text
from twostroke.server.openai.schemas.common import GenerateBody, Lenient
from twostroke.server.openai.schemas.sampling import described


class InputMessage(Lenient):
    """One turn of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class TextFormat(Lenient):
    """The format that the text must have."""

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

    format: TextFormat = TextFormat()


def _messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(GenerateBody):
    """Answer an input. Answers are not stored, so one cannot be continued by its id."""

    input: Annotated[list[InputMessage], BeforeValidator(_messages), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, described("max_tokens")] = None
    text: TextOptions = TextOptions()
    metadata: dict[str, str] = Field(default_factory=dict)
    previous_response_id: str | None = None
    tools: list[Any] = Field(default_factory=list)
