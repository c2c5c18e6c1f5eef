"""The bodies of /tokenize and /detokenize."""

from typing import Annotated

from pydantic import Field, model_validator

from twostroke.server.openai.schemas.chat import Message
from twostroke.server.openai.schemas.common import Lenient, TokenId


class TokenizeBody(Lenient):
    """A text, or messages that go through the chat template.

    `add_special_tokens` concerns a text (the template alone decides which special tokens messages get),
    `add_generation_prompt` messages: whether the beginning of an answer follows them.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _either(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Lenient):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
