"""/v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.engine.request import Request
from twostroke.server.answer import Answer
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError
from twostroke.server.exchange import Exchange
from twostroke.server.generate import generate
from twostroke.server.openai.answers.chat import ChatAnswer
from twostroke.server.openai.answers.completions import CompletionAnswer
from twostroke.server.openai.constraints import constraint
from twostroke.server.openai.conversation import Conversation
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.openai.schemas.completions import CompletionBody
from twostroke.server.prepare import choose_method, engine_requests

router = APIRouter(prefix="/v1")


@router.post("/completions")
async def completions(body: CompletionBody, http: HttpRequest) -> Response:
    """Continue texts or token ids."""
    engine: AsyncEngine = http.app.state.engine
    body = body.with_defaults(engine.llm.generation)
    technique = choose_method(engine.name, body.model, body.method)
    refuse(
        ("echo", body.echo),
        ("suffix", bool(body.suffix)),
        ("best_of", body.best_of is not None and body.best_of > body.n),
    )

    def prepare() -> list[Request]:
        params = body.sampling(body.max_tokens, body.logprobs, constraint(engine.grammars, body))
        return engine_requests(engine.llm, body.prompt, params, technique)

    def answer(exchange: Exchange) -> Answer:
        return CompletionAnswer(body.model or engine.name, exchange, body, engine.llm.tokenizer)

    return await generate(http, body.terms(len(body.prompt)), prepare, answer)


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
    """Answer a conversation."""
    engine: AsyncEngine = http.app.state.engine
    refuse(("functions", body.functions is not None))
    conversation = Conversation(engine, body)

    def answer(exchange: Exchange) -> Answer:
        return ChatAnswer(body.model or engine.name, exchange, conversation.body, engine.llm.tokenizer)

    return await generate(http, body.terms(), conversation.requests, answer)


def refuse(*asked: tuple[str, bool]) -> None:
    """Raise ApiError for the first field that asks for what this server does not do."""
    for field, wanted in asked:
        if wanted:
            raise ApiError(400, f"{field} is not supported here: leave it out", param=field)
