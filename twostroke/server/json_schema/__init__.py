"""JSON schemas that an answer is guaranteed to satisfy.

The grammar library compiles many schemas, ignores some keywords, and understands a few in its own way. So a schema is
not handed to it as it is. It is read here, and written anew with the few keywords whose meaning is known:

    report.py         what becomes of a keyword that cannot be guaranteed: an error if strict, otherwise a warning
    references.py     `$ref`, `$anchor`, and the draft that a schema is written in
    alternatives.py   `$ref`, `allOf`, `anyOf`, `oneOf`, `if`, `not` and dependencies as a list of conjunctions
    conjunction.py    the keywords of a conjunction joined: types, bounds, items, properties
    numbers.py        bounds and multiples of numbers, and which of them texts can be compared with exactly
    patterns.py       Python's regular expressions in the grammar library's syntax
    formats.py        `format` as regular expressions
    exclusion.py      whether a conjunction and a schema have no instance in common, as `oneOf` and `not` need
    shapes.py         a place of a schema, the shapes that a value may have there, and whether one exists
    places.py         the conjunctions of each place as shapes
    writer.py         the schema for the grammar library
    unique_keys.py    keys of an open object that differ, which a grammar cannot say

What is written accepts a part of what the schema accepts, never more. Objects without `additionalProperties` are
closed, numbers and strings have the forms that validators agree on. Validators read JSON schemas as Python's
`jsonschema` does: the draft is that of `$schema`, or 2020-12.
"""

from twostroke.server.json_schema.writer import ANY_OBJECT, Guaranteed, guaranteed

__all__ = ["ANY_OBJECT", "Guaranteed", "guaranteed"]
