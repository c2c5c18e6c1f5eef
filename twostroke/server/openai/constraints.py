"""The grammar that a body asks for: a response format, a regular expression, a choice, or calls of tools."""

from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.sampling.constraint import ConstraintFactory
from twostroke.server import grammar, tools
from twostroke.server.errors import ApiError
from twostroke.server.grammar import Grammars
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.openai.schemas.common import GenerateBody
from twostroke.server.tool_parser import CallReading


def constraint(
    grammars: Grammars, body: GenerateBody, warnings: list[str] | None = None, reading: CallReading | None = None
) -> ConstraintFactory | None:
    """The grammar that an answer must follow, if any.

    Args:
        grammars: those of the model's tokenizer.
        body: what the client sent.
        warnings: takes a line for each schema that is not enforced.
        reading: how calls of tools are read.

    Raises:
        ApiError: a grammar that cannot be followed. Names the field that asked for it.
    """
    asked: dict[str, Any] = {}
    if body.response_format is not None and body.response_format.type != "text":
        schema = body.response_format.json_schema
        asked["response_format"] = json_grammar(schema and schema.schema_, schema is None or schema.strict)
    if body.regex is not None:
        asked["regex"] = grammar.regex(body.regex)
    if body.choice is not None:
        asked["choice"] = grammar.choice(body.choice)
    if isinstance(body, ChatBody) and body.callable_functions:
        dumped = [function.for_template() for function in body.callable_functions]
        try:
            asked["tools"] = tools.grammar(
                dumped,
                required=body.must_call,
                parallel=body.parallel,
                marks=reading.shown if reading else (),
                tagged=reading is not None and reading.tagged,
                warnings=warnings,
            )
        except InvalidRequest as error:
            raise ApiError(400, f"tools: {error}", param="tools") from None
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
