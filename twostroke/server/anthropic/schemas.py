"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, UndeclaredField, whole_number
from twostroke.server.openai.schemas.common import CacheSalt
from twostroke.server.openai.schemas.reasoning import ThinkingOptions

Whole = Annotated[int, BeforeValidator(whole_number)]


def _blocks(value: Any) -> Any:
    """A text is a list of one text block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ContentBlock(LenientModel):
    """A block of content. `translate.py` says which types, and which of their fields, are read."""

    type: str

    def undeclared(self, path: str = "") -> Iterator[UndeclaredField]:
        yield from ()


Content = Annotated[list[ContentBlock], BeforeValidator(_blocks)]


class AnthropicMessage(LenientModel):
    """One turn. A system message among the turns is Claude Code's way to tell the model what has changed."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(LenientModel):
    """A tool of the client's, with a schema; or one of Anthropic's own, which has a type and no schema."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
    )
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False

    def undeclared(self, path: str = "") -> Iterator[UndeclaredField]:
        if self.input_schema is not None:  # one of Anthropic's own is left out as a whole
            yield from super().undeclared(path)


class AnthropicToolChoice(LenientModel):
    """Whether tools may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(LenientModel):
    """The schema that the answer must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientModel):
    """The format of the answer, and how much to think before it."""

    format: OutputFormat | None = None
    effort: str | None = None


class PromptBody(LenientModel):
    """The fields that make a prompt. Cache marks have no effect: every prompt is cached."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "betas", "context_management", "metadata", "service_tier", "inference_geo", "diagnostics"}
    )
    WITHOUT_EFFECT: ClassVar[Neutral] = {"container": (), "mcp_servers": ([],), "speed": ("standard",)}

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Content = Field(default_factory=list)
    tools: list[AnthropicTool] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None


class MessagesBody(PromptBody):
    """Answer a conversation.

    Beyond Anthropic's: min_p, seed, method, priority, timeout, cache_salt, receipt, as in chat completions.
    """

    max_tokens: Annotated[Whole, Field(ge=1)]
    stream: bool = False
    stop_sequences: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    temperature: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    top_k: Annotated[Whole | None, Field(ge=-1)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Whole | None = None
    method: str | dict[str, Any] | None = None
    priority: Annotated[Whole, Field(ge=-100, le=100)] = 0
    timeout: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    cache_salt: CacheSalt = None
    receipt: bool = False
