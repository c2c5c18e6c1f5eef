"""/tokenize and /detokenize."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError
from twostroke.server.openai.schemas.tokens import DetokenizeBody, TokenizeBody
from twostroke.server.prepare import chat_tokens, choose_method
from twostroke.server.transport import json_response

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: HttpRequest) -> Response:
    """The ids of a text or of messages, with their texts."""
    engine: AsyncEngine = http.app.state.engine
    choose_method(engine.name, body.model, None)
    tokenizer = engine.llm.tokenizer

    def encode() -> list[int]:
        if body.messages is not None:
            messages = [message.for_template() for message in body.messages]
            return chat_tokens(engine.llm, messages, add_generation_prompt=body.add_generation_prompt)
        return tokenizer.encode(body.prompt or "", add_bos=None if body.add_special_tokens else False)

    ids = await engine.aside(encode)
    facts = {"count": len(ids), "max_model_len": engine.llm.max_model_len, "tokens": ids}
    return json_response(facts | {"token_strs": [tokenizer.token_text(id) for id in ids]})


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: HttpRequest) -> Response:
    """The text of ids, special tokens by name."""
    engine: AsyncEngine = http.app.state.engine
    choose_method(engine.name, body.model, None)
    if any(id >= engine.llm.config.vocab_size for id in body.tokens):
        most = engine.llm.config.vocab_size - 1
        raise ApiError(400, f"tokens must be ids from 0 to {most}", param="tokens")
    text = await engine.aside(lambda: engine.llm.tokenizer.decode(body.tokens, skip_special=False))
    return json_response({"prompt": text})
