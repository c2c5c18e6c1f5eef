"""The body of /v1/contexts."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from twostroke.server.openai.schemas.base_model import LenientModel, whole_number
from twostroke.server.openai.schemas.chat import ChatMessage, ChatPrompt
from twostroke.server.openai.schemas.common import CacheSalt
from twostroke.server.openai.schemas.completions import is_id
from twostroke.server.openai.schemas.content import NAME

ContextName = Annotated[str, Field(pattern=NAME)]
TTL_S = 3600.0  # seconds that a context lives if nothing is said
MAX_TTL_S = 7 * 86400.0


def _prompt(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(map(is_id, value))):
        return value
    raise ValueError("a text or a list of token ids")


class LifeBody(LenientModel):
    """How long a context lives from now on: `ttl` seconds, or until it is deleted if it is pinned."""

    ttl: Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)] = TTL_S
    pinned: bool = False

    @property
    def seconds(self) -> float:
        """`ttl`, or infinity."""
        return math.inf if self.pinned else self.ttl


class ContextBody(ChatPrompt, LifeBody):
    """Messages as in a chat, with the tools that they go with; or a text or token ids, as in completions.

    The messages go through the chat template without the beginning of an answer.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"input": "prompt", "tokens": "prompt"}
    model: str | None = None
    name: ContextName | None = None
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
        tools = [one.for_template() for one in self.callable_functions]
        return self.prompt, messages, tools, self.variables, self.continue_final_message


class ForkBody(LifeBody):
    """Where a fork leaves its context: behind `at` tokens of the answer at its end (without it, behind all), `text`."""

    name: ContextName | None = None
    at: Annotated[int | None, Field(ge=0), BeforeValidator(whole_number)] = None
    text: str = ""
