"""The bodies of /tokenize and /detokenize."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from twostroke.server.openai.schemas.base_model import LenientModel, TokenId, set_alias
from twostroke.server.openai.schemas.chat import ChatMessage, ChatPrompt


class TokenizeBody(ChatPrompt):
    """A text, or messages that go through the chat template as those of a chat do.

    `with_pieces` puts each token's text beside its id, as llama.cpp does. `add_special_tokens` concerns a text: the
    template alone decides which special tokens messages get.
    """

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"return_token_strs"})  # they are always returned
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(default_factory=list)
    add_special_tokens: bool = True
    parse_special: bool = True
    with_pieces: bool = False

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """llama.cpp's form: `content`, without special tokens around it unless `add_special` asks for them."""
        if "content" in given:
            set_alias(given, "prompt", given.pop("content"), "content")
            given.setdefault("add_special_tokens", given.pop("add_special", False))
        return given

    @model_validator(mode="after")
    def _either(self) -> "TokenizeBody":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeBody(LenientModel):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
