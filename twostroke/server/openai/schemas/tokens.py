"""The bodies of /tokenize and /detokenize."""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from twostroke.server.openai.schemas.base_model import LenientModel, TokenId
from twostroke.server.openai.schemas.chat import ChatMessage, ChatPrompt


class TokenizeBody(ChatPrompt):
    """A text, or messages that go through the chat template as those of a chat do.

    `add_special_tokens` concerns a text: the template alone decides which special tokens messages get.
    """

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"return_token_strs"})  # they are always returned
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(default_factory=list)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _either(self) -> "TokenizeBody":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeBody(LenientModel):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
