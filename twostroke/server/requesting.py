"""From a client's body to the engine's requests. Runs off the event loop: templates, tokens and grammars take time."""

from collections.abc import Iterable, Sequence
from typing import Any

from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.llm import LLM
from twostroke.methods import METHODS, Method, method
from twostroke.sampling.constraint import ConstraintFactory
from twostroke.sampling.params import SamplingParams
from twostroke.server import grammar, tools
from twostroke.server.errors import ApiError, invalid
from twostroke.server.grammar import Grammars
from twostroke.server.schemas.chat import ChatBody, Message, NamedFunction
from twostroke.server.schemas.common import Generating


def choose_method(served: str, model: str | None, chosen: str | dict[str, Any] | None) -> Method:
    """The technique that a request names in its body, or by the model's alias `NAME:METHOD`.

    Raises ApiError: 404 for another model, 400 for a method or a parameter that there is not.
    """
    alias = None
    if model is not None and model != served:
        name, _, alias = model.rpartition(":")
        if name != served or alias not in METHODS:
            message = f"there is no model {model!r:.100}; there is {served!r}, alone or as {served}:METHOD"
            raise ApiError(404, message, param="model", code="model_not_found")
    fields = {"name": chosen} if isinstance(chosen, str) else dict(chosen or {})
    named = fields.pop("name", alias or "plain")
    try:
        if not isinstance(named, str):
            raise InvalidRequest(f"a method's name is a text, not {named!r:.60}")
        return method(named, **fields)
    except InvalidRequest as error:
        raise invalid(error, "method") from None


def check_length(llm: LLM, tokens: int) -> None:
    """Raise ApiError for a prompt after which no token could come."""
    most = min(llm.config.max_position - 1, (llm.pool.num_pages - 1) * llm.pool.page_size)
    if tokens > most:
        message = f"the prompt has {tokens} tokens; at most {most} leave room for an answer: shorten it"
        raise ApiError(400, message, code="context_length_exceeded")


def requests(
    llm: LLM, prompts: Iterable[str | Sequence[int]], params: SamplingParams, technique: Method
) -> list[Request]:
    """A request for each prompt. Raises ApiError or InvalidRequest."""
    made: list[Request] = []
    for prompt in prompts:
        tokens = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        check_length(llm, len(tokens))
        made.append(llm.request(tokens, params, technique))
    return made


def chat_tokens(
    llm: LLM, messages: Sequence[Message], body: ChatBody | None = None, *, add_generation_prompt: bool = True
) -> list[int]:
    """A conversation through the chat template. Raises InvalidRequest if there is none or it refuses."""
    rendered = [message.for_template() for message in messages]
    functions = [] if body is None else body.callable_functions
    offered = [{"type": "function", "function": f.model_dump(exclude_none=True)} for f in functions]
    variables = {} if body is None else body.chat_template_kwargs
    if taken := {"messages", "tools", "add_generation_prompt"} & set(variables):
        raise ApiError(400, f"{min(taken)} is no template variable to set", param="chat_template_kwargs")
    if not tools.knows_tools(llm.tokenizer.chat_template):
        rendered, offered = tools.described(rendered, offered), []
    return llm.tokenizer.encode_chat(
        rendered, tools=offered or None, add_generation_prompt=add_generation_prompt, **variables
    )


def constraint(grammars: Grammars, body: Generating) -> ConstraintFactory | None:
    """The grammar that an answer must follow, if any. Raises ApiError, which names the field that asked for it."""
    asked: dict[str, Any] = {}
    if body.response_format is not None and body.response_format.type != "text":
        schema = body.response_format.json_schema
        asked["response_format"] = json_grammar(schema and schema.schema_, schema is None or schema.strict)
    if body.regex is not None:
        asked["regex"] = grammar.regex(body.regex)
    if body.choice is not None:
        asked["choice"] = grammar.choice(body.choice)
    if isinstance(body, ChatBody) and body.callable_functions:
        forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedFunction)
        dumped = [function.model_dump(exclude_none=True) for function in body.callable_functions]
        asked["tools"] = tools.grammar(dumped, required=forced, parallel=body.parallel_tool_calls)
    if len(asked) > 1:
        first, second, *_ = asked
        raise ApiError(400, f"{second} cannot be combined with {first}", param=second)
    return compiled(grammars, *asked.popitem()) if asked else None


def compiled(grammars: Grammars, field: str, text: str) -> ConstraintFactory:
    """Raises ApiError naming the field."""
    try:
        return grammars.compile(text)
    except InvalidRequest as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None


def json_grammar(schema: dict[str, Any] | None, strict: bool) -> str:
    """The grammar of a schema; of any JSON object where there is none."""
    return grammar.json_schema({"type": "object"} if schema is None else schema, strict)
