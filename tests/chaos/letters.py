"""A tokenizer of 32 tokens that can write JSON: requests with grammars and stop strings need texts."""

from __future__ import annotations

from functools import cache
from typing import cast

from twostroke.models.checkpoints.text_stream import TextStream
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.constraint import ConstraintFactory
from twostroke.server.grammar import Grammars, json_schema

END = b"</s>"
# Some texts are several tokens, or begin or end within one, and two tokens are halves of a character.
TEXTS = (
    b"{", b"}", b"[", b"]", b'"', b":", b",", b" ", b"0", b"1", b"2", b"7", b"a", b"b", b"c", b"e", b"n", b"-",
    b'{"', b'": ', b', "', b", ", b'"}', b"ab", b"tr", b"ue", b"fal", b"se", b"12", b"\xc3", b"\xa9", END,
)  # fmt: skip
VOCAB = len(TEXTS)
# An object that is long enough for most faults to find it half written, and of which much is free.
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 12},
        "b": {"type": "string", "minLength": 6, "maxLength": 30},
        "c": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 20},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


class Letters:
    """The part of `Tokenizer` that requests and grammars use."""

    vocab_size = VOCAB
    bos_id: int | None = None
    eos_ids = special_ids = frozenset({VOCAB - 1})
    fingerprint = "letters"

    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
        return b"" if skip_special and id in self.special_ids else TEXTS[id]

    def stream(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> TextStream:
        return TextStream(self.token_bytes, strip_leading_space=False)

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """The longest tokens, one after another; what no token begins is left out."""
        data, ids = text.encode(), list[int]()
        while data:
            found = [id for id in range(VOCAB - 1) if data.startswith(TEXTS[id])]
            best = max(found, key=lambda id: len(TEXTS[id]), default=None)
            ids += [] if best is None else [best]
            data = data[1 if best is None else len(TEXTS[best]) :]
        return ids


@cache
def grammar() -> ConstraintFactory:
    """Bounds an answer to the JSON texts of `SCHEMA`, as a front end's `response_format` does."""
    return Grammars(cast(Tokenizer, Letters()), VOCAB).compile(json_schema(SCHEMA))
