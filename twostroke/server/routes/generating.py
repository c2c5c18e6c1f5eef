"""/v1/completions, /v1/chat/completions and /v1/responses."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.engine.request import Request
from twostroke.server.answers.answer import Answer
from twostroke.server.answers.chat import ChatAnswer
from twostroke.server.answers.completions import CompletionAnswer
from twostroke.server.answers.responses import ResponsesAnswer
from twostroke.server.errors import ApiError
from twostroke.server.generation import Generation
from twostroke.server.requesting import chat_tokens, choose_method, compiled, constraint, json_grammar, requests
from twostroke.server.respond import respond
from twostroke.server.schemas.chat import ChatBody, Message, NamedFunction
from twostroke.server.schemas.completions import CompletionBody
from twostroke.server.schemas.responses import ResponsesBody
from twostroke.server.service import Service

router = APIRouter(prefix="/v1")


@router.post("/completions")
async def completions(body: CompletionBody, http: HttpRequest) -> Response:
    """Continue texts or token ids."""
    service: Service = http.app.state.service
    technique = choose_method(service.name, body.model, body.method)
    refuse(
        ("echo", body.echo),
        ("suffix", bool(body.suffix)),
        ("best_of", body.best_of is not None and body.best_of > body.n),
    )

    def prepare() -> list[Request]:
        params = body.sampling(body.max_tokens, body.logprobs, constraint(service.grammars, body))
        return requests(service.llm, body.prompt, params, technique)

    def answer(generation: Generation) -> Answer:
        return CompletionAnswer(body.model or service.name, generation, body, service.llm.tokenizer)

    return await respond(http, body, len(body.prompt), prepare, answer)


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = http.app.state.service
    technique = choose_method(service.name, body.model, body.method)
    refuse(("functions", body.functions is not None))
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if not body.callable_functions and (isinstance(body.tool_choice, NamedFunction) or body.tool_choice == "required"):
        raise ApiError(400, "tool_choice asks for a call of a function that tools does not have", param="tool_choice")

    def prepare() -> list[Request]:
        most = body.max_completion_tokens or body.max_tokens
        logprobs = body.top_logprobs if body.logprobs else None
        params = body.sampling(most, logprobs, constraint(service.grammars, body))
        return requests(service.llm, [chat_tokens(service.llm, body.messages, body)], params, technique)

    def answer(generation: Generation) -> Answer:
        return ChatAnswer(body.model or service.name, generation, body, service.llm.tokenizer)

    return await respond(http, body, 1, prepare, answer)


@router.post("/responses")
async def responses(body: ResponsesBody, http: HttpRequest) -> Response:
    """Answer an input with text."""
    service: Service = http.app.state.service
    technique = choose_method(service.name, body.model, body.method)
    refuse(
        ("previous_response_id", body.previous_response_id is not None), ("tools", bool(body.tools)), ("n", body.n != 1)
    )

    def prepare() -> list[Request]:
        wanted = body.text.format
        if wanted.type == "text":
            grammar = constraint(service.grammars, body)
        else:
            refuse(*((field, getattr(body, field) is not None) for field in ("response_format", "regex", "choice")))
            grammar = compiled(service.grammars, "text", json_grammar(wanted.schema_, wanted.strict))
        first = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
        said = [Message(role=message.role, content=message.content) for message in body.input]
        params = body.sampling(body.max_output_tokens, None, grammar)
        return requests(service.llm, [chat_tokens(service.llm, [*first, *said])], params, technique)

    def answer(generation: Generation) -> Answer:
        return ResponsesAnswer(body.model or service.name, generation, body)

    return await respond(http, body, 1, prepare, answer)


def refuse(*asked: tuple[str, bool]) -> None:
    """Raise ApiError for the first field that asks for what is not done, rather than answer something else."""
    for field, wanted in asked:
        if wanted:
            raise ApiError(400, f"{field} is not supported here: leave it out", param=field)
