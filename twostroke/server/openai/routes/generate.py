"""/v1/completions and /v1/chat/completions."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.api.llm import LLM
from twostroke.server.active_call import ActiveCall
from twostroke.server.answer import Answer
from twostroke.server.async_engine import CurrentEngine
from twostroke.server.contexts.hold import find_context, keep_answer, with_named
from twostroke.server.engine_requests import (
    Prepared,
    check_length,
    check_size,
    choose_method,
    engine_requests,
    infill_ends,
    infill_prompt,
    truncated,
    with_receipt,
)
from twostroke.server.errors import ApiError
from twostroke.server.generate import generate
from twostroke.server.openai.answers.chat import ChatAnswer
from twostroke.server.openai.answers.completions import CompletionAnswer, Echo
from twostroke.server.openai.constraints import constraint
from twostroke.server.openai.prepare_chat import PreparedChat, prepare_chat, unused_variables
from twostroke.server.openai.schemas.base_model import warn_of_fields
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.openai.schemas.common import salt_bytes
from twostroke.server.openai.schemas.completions import CompletionBody

router = APIRouter(prefix="/v1")


@router.post("/completions")
async def completions(body: CompletionBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Continue texts or token ids."""
    warn_of_fields(http, body)
    body = body.with_defaults(engine.llm.generation)
    technique = choose_method(engine.name, body.model, body.method)
    context = None if body.context is None else await find_context(http, body.context)
    refuse(
        ("a receipt without an answer", body.receipt and body.max_tokens == 0),
        ("best_of", body.best_of is not None and body.best_of != body.n),
        ("prompt_logprobs in a stream", body.stream and body.prompt_logprobs is not None),
    )
    refuse_beside_suffix(body)
    tokenizer, echoes = engine.llm.tokenizer, list[Echo]()

    def prepare() -> Prepared:
        warnings: list[str] = []
        params = body.sampling(body.max_tokens, body.logprobs, constraint(engine.grammars, body, warnings))
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
        if body.suffix:
            params = infill_ends(engine.llm, params)
        asked = body.prompt if context is None else [context.before_prompt(tokenizer, one) for one in body.prompt]
        prompts = [prompt_of(engine.llm, prompt, body) for prompt in asked]
        if body.echo:
            echoes.extend(prompts)
        tokens = [prompt.tokens for prompt in prompts]
        if body.receipt:
            params = with_receipt(params, technique)
        requests = engine_requests(engine.llm, tokens, params, technique, context, salt_bytes(body.cache_salt))
        return Prepared(requests, tokens, warnings, receipt=body.receipt)

    def answer(_: Prepared, active_call: ActiveCall) -> Answer:
        return CompletionAnswer(body.model or engine.name, active_call, body, tokenizer, echoes)

    return await generate(http, body.call_options(len(body.prompt)), prepare, answer)


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, http: HttpRequest, engine: CurrentEngine) -> Response:
    """Answer a conversation."""
    warn_of_fields(http, body, *unused_variables(engine, body))
    refuse(("prompt_logprobs in a stream", body.stream and body.prompt_logprobs is not None))
    context = None if body.context is None else await find_context(http, body.context)
    body, named = await with_named(http, body)

    def prepare() -> PreparedChat:
        return prepare_chat(engine, body, context, named=named)

    def answer(prepared: PreparedChat, active_call: ActiveCall) -> Answer:
        made = ChatAnswer(body.model or engine.name, active_call, prepared.body, engine.llm.tokenizer)

        async def kept() -> dict[str, Any]:
            ids = [token.id for token in made.tokens.get((0, 0), ())]
            return await keep_answer(http, prepared.body, made.message, ids, context)

        if body.keep:
            made.on_finish.append(kept)
        return made

    return await generate(http, body.call_options(), prepare, answer)


def prompt_of(llm: LLM, prompt: str | list[int], body: CompletionBody) -> Echo:
    """A prompt's tokens, and the text that they are sent back with. Raises InvalidRequest."""
    tokenizer = llm.tokenizer
    if body.suffix:
        return Echo("", infill_prompt(llm, prompt, body.suffix))
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        check_size(llm, prompt)
    add_bos = None if body.add_special_tokens else False
    tokens = tokenizer.encode(prompt, add_bos=add_bos) if isinstance(prompt, str) else list(prompt)
    kept = truncated(llm, tokens, body.truncate_prompt_tokens)
    if not isinstance(prompt, str) or len(kept) < len(tokens):
        check_length(llm, len(kept))  # before unknown ids are looked up
        return Echo(tokenizer.decode(kept, skip_special=False), kept)
    begins = body.add_special_tokens and tokenizer.add_bos
    return Echo(prompt, kept, int(begins))


def refuse_beside_suffix(body: CompletionBody) -> None:
    """Raise ApiError for a field that has no meaning where the prompt is a text with a gap."""
    beside = {
        "echo": body.echo,
        "context": body.context is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
    }
    for field, given in beside.items():
        if body.suffix and given:
            raise ApiError(400, f"{field} cannot be combined with suffix: leave one of them out", param=field)


def refuse(*asked: tuple[str, bool]) -> None:
    """Raise ApiError for the first field that asks for what this server does not do."""
    for field, wanted in asked:
        if wanted:
            raise ApiError(400, f"{field} is not supported here: leave it out", param=field)
