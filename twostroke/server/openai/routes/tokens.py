"""/tokenize, /detokenize and /tokenizer_info."""

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field, model_validator

from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.contexts.hold import with_named
from twostroke.server.engine_requests import choose_method
from twostroke.server.errors import ApiError
from twostroke.server.http.call_log import call_log
from twostroke.server.http.responses import json_response
from twostroke.server.openai.prepare_chat import prompt_tokens, unused_variables
from twostroke.server.openai.schemas.base_model import LenientModel, TokenId, set_alias, warn_of_fields
from twostroke.server.openai.schemas.chat import ChatMessage, ChatPrompt

router = APIRouter()


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


@router.get("/tokenizer_info")
async def tokenizer_info(engine: CurrentEngine) -> Response:
    """Describe the tokenizer: its special tokens and its chat template."""
    tokenizer = engine.llm.tokenizer
    special = {f"{name}_token": tokenizer.special_tokens.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": tokenizer.add_bos, **special}
    facts |= {"chat_template": tokenizer.chat_template, "model_max_length": engine.llm.config.max_position}
    return json_response(facts)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """The ids of a text, or of messages as a chat would enter them, with their texts."""
    tokenizer = engine.llm.tokenizer
    warn_of_fields(http, body, *(unused_variables(engine, body) if body.messages else ()))
    choose_method(engine.name, body.model, None)
    body, _ = await with_named(http, body)

    def encode() -> list[int]:
        if body.messages:
            return prompt_tokens(engine.llm, body)
        bos = None if body.add_special_tokens else False
        return tokenizer.encode(body.prompt or "", add_bos=bos, parse_special=body.parse_special)

    ids = await engine.run_in_thread(encode)
    tokens = [_piece(tokenizer, id) for id in ids] if body.with_pieces else ids
    facts = {"count": len(ids), "max_model_len": engine.llm.max_model_len, "tokens": tokens}
    return json_response(
        facts | {"token_strs": [tokenizer.token_text(id) for id in ids]} | call_log(http.scope).answer_fields
    )


def _piece(tokenizer: Tokenizer, id: int) -> dict[str, Any]:
    """A token as llama.cpp writes it: its text, or its bytes where they are no text."""
    data = tokenizer.token_bytes(id, skip_special=False)
    try:
        return {"id": id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": id, "piece": list(data)}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """The text of ids, special tokens by name."""
    warn_of_fields(http, body)
    choose_method(engine.name, body.model, None)
    if any(id >= engine.llm.config.vocab_size for id in body.tokens):
        most = engine.llm.config.vocab_size - 1
        raise ApiError(400, f"tokens must be ids from 0 to {most}", param="tokens")
    text = await engine.run_in_thread(lambda: engine.llm.tokenizer.decode(body.tokens, skip_special=False))
    return json_response({"prompt": text, "content": text} | call_log(http.scope).answer_fields)
