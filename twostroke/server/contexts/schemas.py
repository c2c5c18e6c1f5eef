"""The body of /v1/contexts."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from twostroke.server.openai.schemas.chat import ChatMessage, ChatPrompt
from twostroke.server.openai.schemas.common import CacheSalt
from twostroke.server.openai.schemas.completions import is_id

TTL_S = 3600.0  # seconds that a context lives if nothing is said
MAX_TTL_S = 7 * 86400.0


def _prompt(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(map(is_id, value))):
        return value
    raise ValueError("a text or a list of token ids")


class ContextBody(ChatPrompt):
    """Messages as in a chat, with the tools that they go with; or a text or token ids, as in completions.

    The messages go through the chat template without the beginning of an answer.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"input": "prompt", "tokens": "prompt"}
    model: str | None = None
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")] = None
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)] = TTL_S
    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(default_factory=list)
    cache_salt: CacheSalt = None
    prompt: Annotated[Any, BeforeValidator(_prompt)] = None
    add_generation_prompt: bool = False

    @model_validator(mode="after")
    def _either(self) -> "ContextBody":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("messages: give either messages or prompt")
        return self

    @property
    def content(self) -> Any:
        """A value that is equal for equal contexts."""
        messages = [message.for_template() for message in self.messages]
        return self.prompt, messages, [one.for_template() for one in self.callable_functions], self.variables
