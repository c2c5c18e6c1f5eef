"""The body of /v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from twostroke.server.openai.schemas import other_servers
from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, whole_number
from twostroke.server.openai.schemas.common import ChatFields, GenerateBody, described
from twostroke.server.openai.schemas.reasoning import ReasoningFields

LOGPROBS = "message.output_text.logprobs"  # the one value of `include` that has an effect


class TextFormat(LenientModel):
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


class TextOptions(LenientModel):
    """OpenAI's `text` object."""

    WITHOUT_EFFECT: ClassVar[Neutral] = {"verbosity": ("medium",)}
    format: TextFormat = TextFormat()


def _items(value: Any) -> Any:
    """A text is one message. An item's type may be left out where its other fields tell it."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [_typed(item) if isinstance(item, dict) else item for item in value]


def _typed(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") is not None:
        return item
    return {**item, "type": "item_reference" if "id" in item and "role" not in item else "message"}


class ResponsesBody(ChatFields, ReasoningFields, GenerateBody):
    """Answer an input. `items.py` says which items, tools and choices are read."""

    LIMIT: ClassVar[str] = "max_output_tokens"
    ALIASES: ClassVar[Mapping[str, str]] = other_servers.ALIASES | {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
    }
    WITHOUT_EFFECT: ClassVar[Neutral] = other_servers.WITHOUT_EFFECT | {"context_management": ([],)}
    UNSUPPORTED: ClassVar[Neutral] = other_servers.UNSUPPORTED | {
        "background": (False,),
        "conversation": (),
        "keep": (False,),
        "prompt": (),
    }
    input: Annotated[list[dict[str, Any]], BeforeValidator(_items), Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Annotated[int | None, described("max_tokens", ge=1), BeforeValidator(whole_number)] = None
    text: TextOptions = TextOptions()
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024)] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    include: list[str] = Field(default_factory=list)
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # Without effect; the response repeats them.
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities were asked for, in either way."""
        return LOGPROBS in self.include or self.top_logprobs > 0
