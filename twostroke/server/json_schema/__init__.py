"""JSON schemas that an answer is guaranteed to satisfy.

The grammar library, llguidance, reads a schema as validators do and refuses what it does not implement. What it leaves
open is added here: a schema is rewritten so that every text which the library generates satisfies the client's schema.
Objects without `additionalProperties` are closed, keys differ, numbers and strings have forms on which validators
agree, and what cannot be guaranteed is an error if the schema is strict, or a warning.

    document.py      references into a schema, and the report of what is not enforced
    rewriter.py      the schema, keyword by keyword
    library.py       the library: its limits, the layout of texts, whether it takes a schema
    keywords.py      what keywords there are, and what their values must be
    exclusive.py     whether options of a `oneOf` exclude each other
    numbers.py       bounds and multiples of numbers
    patterns.py      regular expressions and formats
    unique_keys.py   keys of an open object that differ, which a grammar cannot say

What is written accepts a part of what the schema accepts, never more. Validators read JSON schemas as Python's
`jsonschema` does: the draft is that of `$schema`, or 2020-12.
"""

from twostroke.server.json_schema.rewriter import ANY_OBJECT, enforced_schema

__all__ = ["ANY_OBJECT", "enforced_schema"]
