"""/tokenize and /detokenize."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.server.errors import ApiError
from twostroke.server.requesting import chat_tokens, choose_method
from twostroke.server.respond import json_response
from twostroke.server.schemas.tokens import DetokenizeBody, TokenizeBody
from twostroke.server.service import Service

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: HttpRequest) -> Response:
    """The ids of a text or of messages, with their texts."""
    service: Service = http.app.state.service
    choose_method(service.name, body.model, None)
    tokenizer = service.llm.tokenizer

    def encode() -> list[int]:
        if body.messages is not None:
            return chat_tokens(service.llm, body.messages, add_generation_prompt=body.add_generation_prompt)
        return tokenizer.encode(body.prompt or "", add_bos=None if body.add_special_tokens else False)

    ids = await service.prepare(encode)
    facts = {"count": len(ids), "max_model_len": service.llm.config.max_position, "tokens": ids}
    return json_response(facts | {"token_strs": [tokenizer.token_text(id) for id in ids]})


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: HttpRequest) -> Response:
    """The text of ids, special tokens by name."""
    service: Service = http.app.state.service
    choose_method(service.name, body.model, None)
    if any(id >= service.llm.config.vocab_size for id in body.tokens):
        most = service.llm.config.vocab_size - 1
        raise ApiError(400, f"tokens must be ids from 0 to {most}", param="tokens")
    text = await service.prepare(lambda: service.llm.tokenizer.decode(body.tokens, skip_special=False))
    return json_response({"prompt": text})
