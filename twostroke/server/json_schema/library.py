"""The grammar library, llguidance, as every schema is given to it."""

import json
from typing import Any

import llguidance

# A mask is made between two steps of the engine: what takes longer than some tens of milliseconds ends in an error.
LIMITS = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=300_000, step_lexer_fuel=100_000)
# The layout of json.dumps, which models know well. With free whitespace, a weak model may write nothing else. A text
# has one spelling (without \u escapes), so equal keys are equal bytes.
LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}


def with_layout(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that says how its texts are laid out."""
    return {**schema, "x-guidance": LAYOUT}


def grammar_of(schema: dict[str, Any]) -> str:
    """The grammar of a schema's texts, in the library's form."""
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(with_layout(schema)))


def refusal(schema: dict[str, Any]) -> str:
    """Why the library finds no text for a schema, in one line; empty if it finds one."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar_of(schema), limits=LIMITS)
    return " ".join(messages[0].split()) if failed else ""
