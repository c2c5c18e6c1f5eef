"""The grammar that a body asks for: a response format, a regular expression, a choice, or calls of tools."""

import contextlib
from collections.abc import Generator
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.sampling.constraint import ConstraintFactory
from twostroke.server import grammar, tools
from twostroke.server.errors import ApiError
from twostroke.server.grammar import Grammar, Grammars
from twostroke.server.json_schema import ANY_OBJECT
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.openai.schemas.common import GenerateBody
from twostroke.server.tools.parser import ToolParserFactory


def constraint(
    grammars: Grammars, body: GenerateBody, warnings: list[str] | None = None, reading: ToolParserFactory | None = None
) -> ConstraintFactory | None:
    """The grammar that an answer must follow, if any.

    Args:
        grammars: those of the model's tokenizer.
        body: what the client sent.
        warnings: takes a line for each keyword of a schema that is not enforced.
        reading: how calls of tools are read.

    Raises:
        ApiError: a grammar that cannot be followed. Names the field that asked for it.
    """
    asked: dict[str, Any] = {}
    if body.response_format is not None and body.response_format.type != "text":
        schema = body.response_format.json_schema
        with _naming("response_format"):
            asked["response_format"] = json_grammar(schema and schema.schema_, bool(schema and schema.strict), warnings)
    if body.regex is not None:
        asked["regex"] = grammar.regex(body.regex)
    if body.choice is not None:
        with _naming("choice"):
            asked["choice"] = grammar.choice(body.choice)
    if body.grammar is not None:
        with _naming("grammar"):
            asked["grammar"] = grammar.lark(body.grammar)
    if isinstance(body, ChatBody) and body.callable_functions:
        dumped = [function.for_template() for function in body.callable_functions]
        with _naming("tools"):
            asked["tools"] = tools.grammar(
                dumped,
                required=body.must_call,
                parallel=body.parallel,
                marks=reading.shown if reading else (),
                tagged=reading is not None and reading.tagged,
                answer=_schema_of_answer(body),
                warnings=warnings,
            )
        asked.pop("response_format", None)  # the format of an answer that does not call
    if len(asked) > 1:
        first, second, *_ = asked
        raise ApiError(400, f"{second} cannot be combined with {first}", param=second)
    return compiled(grammars, *asked.popitem()) if asked else None


def _schema_of_answer(body: GenerateBody) -> dict[str, Any] | None:
    """The schema of the response format, for a grammar that has calls as well. The format has been checked."""
    if body.response_format is None or body.response_format.type == "text":
        return None
    schema = body.response_format.json_schema
    return grammar.embedded_schema(schema.schema_ if schema else ANY_OBJECT, bool(schema and schema.strict))


def compiled(grammars: Grammars, field: str, text: Grammar | str) -> ConstraintFactory:
    """Raises ApiError naming the field."""
    with _naming(field):
        return grammars.compile(text)


def json_grammar(schema: dict[str, Any] | None, strict: bool, warnings: list[str] | None = None) -> Grammar:
    """The grammar of a schema; of any JSON object where there is none. Raises InvalidRequest, see `json_schema`."""
    return grammar.json_schema(ANY_OBJECT if schema is None else schema, strict, warnings)


@contextlib.contextmanager
def _naming(field: str) -> Generator[None]:
    """Errors of a grammar name the field that asked for it."""
    try:
        yield
    except InvalidRequest as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None
