"""Random JSON schemas, and random texts that a grammar allows."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.constraint import Constraint

NAMES = ["a", "b", "kind", 'é"', "a/b~c", "x-1"]
PATTERNS = ["^a", "[0-9]+$", "^(a|b)+c?$", r"^\d{2}-\w+$", "^x-", "^[^a]{2,4}$", r"\s", "a|^b$", r"^\S+@\S+$", "é{2,}"]
FORMATS = [
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "iri"),
    *("uri-reference", "iri-reference", "json-pointer", "idn-email", "int32"),
]
SCALARS: list[Any] = [None, True, False, 0, 1, 1.0, -2, 0.5, 1e-7, "", "a", 'q"\n', "é😀", [], {}, [1, "a"], {"a": 1}]


class Schemas:
    """Random schemas in draft 2020-12."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def document(self) -> dict[str, Any]:
        """A schema with definitions, which it may refer to."""
        made = self.schema(3)
        if not isinstance(made, dict):
            return {"type": "array", "items": made}
        return {**made, "$defs": {"d": self.schema(1), "e": self.schema(2)}}

    def schema(self, depth: int) -> Any:
        """A schema that is at most so deep."""
        pick = self.random.random()
        if pick < 0.06:
            return self.random.choice([True, True, {}, False])
        if pick < 0.14:
            return {"$ref": self.random.choice(["#", "#/$defs/d", "#/$defs/e"])} | self.some(
                self.text() if depth else {}
            )
        flat: list[Callable[[], dict[str, Any]]] = [self.number, self.text, self.values, self.types]
        deep: list[Callable[[int], dict[str, Any]]] = [self.array, self.object, self.object, self.joined]
        if depth <= 0 or self.random.random() < 0.3:
            return self.random.choice(flat)()
        return self.random.choice(deep)(depth - 1)

    def some(self, keywords: dict[str, Any], share: float = 0.3) -> dict[str, Any]:
        """Some of the keywords."""
        return {name: value for name, value in keywords.items() if self.random.random() < share}

    def values(self) -> dict[str, Any]:
        """A list of values."""
        if self.random.random() < 0.3:
            return {"const": self.random.choice(SCALARS)}
        found = {"enum": self.random.choices(SCALARS, k=self.random.randint(1, 5))}
        return found | self.some({"type": self.random.choice(["string", "integer", "number", ["null", "object"]])})

    def types(self) -> dict[str, Any]:
        """A type."""
        names = ["string", "integer", "number", "boolean", "null", "array", "object"]
        return {"type": self.random.choice([*names, self.random.sample(names, 2)])}

    def number(self) -> dict[str, Any]:
        """Bounds of numbers."""
        bounds = [-3, 0, 0.1, 1, 1.5, -0.25, 100, 1e-7, 12345.678, 2**53 + 3, 10**17 + 1, -1e14]
        one, two = sorted(self.random.choices(bounds, k=2))
        limits = self.some(
            {
                self.random.choice(["minimum", "exclusiveMinimum"]): one,
                self.random.choice(["maximum", "exclusiveMaximum"]): two,
                "multipleOf": self.random.choice([1, 2, 3, 7, 0.5, 1.5, 0.25, 0.1, 1e3]),
            },
            0.5,
        )
        return {"type": self.random.choice(["number", "integer"])} | limits

    def text(self) -> dict[str, Any]:
        """Lengths, patterns and formats of texts."""
        least, more = self.random.randint(0, 4), self.random.randint(0, 10)
        limits = {"minLength": least, "maxLength": least + more, "pattern": self.random.choice(PATTERNS)}
        return {"type": "string"} | self.some(limits | {"format": self.random.choice(FORMATS)}, 0.35)

    def array(self, depth: int) -> dict[str, Any]:
        """Items of arrays."""
        least = self.random.randint(0, 2)
        keywords = {
            "items": self.schema(depth),
            "prefixItems": [self.schema(depth) for _ in range(self.random.randint(1, 2))],
            "minItems": least,
            "maxItems": least + self.random.randint(0, 2),
            "uniqueItems": self.random.random() < 0.1,
        }
        return {"type": "array"} | self.some(keywords, 0.5)

    def object(self, depth: int) -> dict[str, Any]:
        """Properties of objects."""
        names = self.random.sample(NAMES, self.random.randint(0, 3))
        rare = {
            "patternProperties": {pattern: self.schema(depth) for pattern in self.random.sample(PATTERNS, 1)},
            "propertyNames": self.random.choice([{"pattern": self.random.choice(PATTERNS)}, {"enum": NAMES[:3]}]),
            "minProperties": self.random.randint(0, 3),
            "maxProperties": self.random.randint(0, 3),
            "dependentRequired": {self.random.choice(NAMES): [self.random.choice(NAMES)]},
            "dependentSchemas": {self.random.choice(NAMES): self.schema(depth)},
            "unevaluatedProperties": self.random.choice([False, {"type": "null"}]),
        }
        usual = {
            "required": self.random.sample([*names, "z"], min(len(names), self.random.randint(0, 2))),
            "additionalProperties": self.random.choice([True, False, self.schema(depth)]),
        }
        shape = {"properties": {name: self.schema(depth) for name in names}} if names else {}
        return {"type": "object"} | shape | self.some(usual, 0.5) | self.some(rare, 0.12)

    def joined(self, depth: int) -> dict[str, Any]:
        """Alternatives, conjunctions, conditions and negations, with siblings."""
        several = [self.schema(depth) for _ in range(self.random.randint(1, 3))]
        keyword = self.random.choice(["anyOf", "anyOf", "oneOf", "allOf", "not", "if"])
        if keyword == "oneOf" and self.random.random() < 0.5:
            several = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": place}, "a": self.schema(depth)},
                    "required": ["kind"],
                }
                for place in range(2)
            ]
        joined: dict[str, Any] = {keyword: several if keyword.endswith("Of") else several[0]}
        if keyword == "if":
            joined |= {"if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}}
            joined |= self.some({"then": several[-1], "else": {"required": ["a"]}}, 0.8)
        siblings = [{}, {}, self.object(depth - 1), {"type": "object"}, self.number(), self.text(), self.values()]
        if keyword == "if":
            siblings = [{"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "a": self.schema(0)}}]
        return joined | self.random.choice(siblings)


class Texts:
    """Random texts that constraints allow."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._bytes = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self._eos = np.array(sorted(tokenizer.eos_ids))
        self._ends = np.isin(np.arange(vocab_size), self._eos)
        self._structure = np.array([token[:1] in (b'"', b"]", b"}", b",", b":") for token in self._bytes])
        self._short = np.array([len(token) <= 2 for token in self._bytes])

    def one(self, constraint: Constraint, seed: int, most: int = 200) -> str | None:
        """A random text, None if it has not ended after so many tokens.

        Ends, quotes and brackets are likelier than other tokens, in some texts much likelier, so that texts end.
        """
        draw = random.Random(seed)
        hurry = draw.choice([0.05, 0.3, 0.8])
        made: list[int] = []
        for _ in range(most):
            mask = constraint.mask()[: len(self._bytes)]
            rest = mask & ~self._ends
            if mask[self._eos].any() and (draw.random() < hurry or not rest.any()):
                return b"".join(self._bytes[token] for token in made).decode()
            assert rest.any(), f"nothing may follow {b''.join(self._bytes[token] for token in made)!r}"
            pick = draw.random()
            wanted = rest & (self._structure if pick < hurry else self._short if pick < 0.9 else rest)
            options = np.flatnonzero(wanted if wanted.any() else rest)
            token = int(options[draw.randrange(len(options))])
            constraint.advance(token)
            made.append(token)
        return None
