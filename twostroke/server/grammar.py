"""Grammars by llguidance: JSON schemas, regular expressions, choices and tool calls as constraints on tokens."""

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.constraint import Constraint, ConstraintFactory
from twostroke.server.json_schema import enforced_schema
from twostroke.server.json_schema.library import LIMITS, grammar_of, with_layout
from twostroke.server.json_schema.patterns import Untranslatable, translate, without_anchors
from twostroke.server.json_schema.unique_keys import KeyTokens, UniqueKeys

MAX_COMPILED = 64  # compiled grammars
MAX_GRAMMAR_CHARACTERS = 1_000_000
MAX_CHOICES = 10_000
MAX_REGEX_CHARACTERS = 20_000


@dataclass(frozen=True)
class Grammar:
    """A grammar that is not yet compiled for a tokenizer.

    Args:
        text: in llguidance's form.
        json_after: what each JSON value in the text follows, empty if the text is one JSON value. The keys of every
            object in these values differ. None: the text has no JSON, or no objects with free keys.
    """

    text: str
    json_after: str | None = None


@dataclass(frozen=True)
class CompiledGrammar:
    """Makes a constraint for every choice. `keys`: what keys are made of, if those of an object must differ."""

    grammar: Grammar
    matcher: llguidance.LLMatcher
    keys: KeyTokens | None

    @property
    def description(self) -> dict[str, str | None]:
        """What `Grammars.remake` takes."""
        return asdict(self.grammar)

    def __call__(self) -> Constraint:
        after, keys = self.grammar.json_after, self.keys
        unique = None if after is None or keys is None else UniqueKeys(keys, after.encode())
        return GrammarConstraint(self.matcher.deep_copy(), unique)


class GrammarConstraint(Constraint):
    """A grammar's state along one choice."""

    def __init__(self, matcher: llguidance.LLMatcher, keys: UniqueKeys | None) -> None:
        self._matcher, self._keys = matcher, keys

    def mask(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little").view(bool)
        return mask if self._keys is None else self._keys.forbid(mask)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()
        if self._keys is not None:
            self._keys.advance(token)

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")


class Grammars:
    """Compiles grammars for one tokenizer and caches the latest `MAX_COMPILED`. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's, which may be padded past the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._vocabulary: tuple[llguidance.LLTokenizer, _Vocabulary] | None = None
        self._key_tokens: KeyTokens | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar | str) -> ConstraintFactory:
        """Raises InvalidRequest for a grammar that is wrong or too large."""
        grammar = grammar if isinstance(grammar, Grammar) else Grammar(grammar)
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(f"a grammar of more than {MAX_GRAMMAR_CHARACTERS:,} characters is too large")
        with self._lock:
            library, vocabulary = self._read_vocabulary()
            matcher = self._compiled.get(grammar.text)
            if matcher is None:
                matcher = llguidance.LLMatcher(library, grammar.text, log_level=0, limits=LIMITS)
                first = matcher.deep_copy()
                if not first.is_error():
                    first.compute_bitmask()  # a grammar without texts, or with too many states, fails here
                if first.is_error():
                    raise InvalidRequest(f"not a grammar that can be followed: {_one_line(first.get_error())}")
                self._compiled[grammar.text] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar.text)
            if grammar.json_after is not None and self._key_tokens is None:
                self._key_tokens = KeyTokens(vocabulary.texts())
            return CompiledGrammar(grammar, matcher, self._key_tokens)

    def remake(self, description: Mapping[str, Any]) -> ConstraintFactory:
        """The grammar that has told this of itself. Raises InvalidRequest."""
        text, after = description.get("text"), description.get("json_after")
        if isinstance(text, str) and isinstance(after, str | None) and set(description) == {"text", "json_after"}:
            return self.compile(Grammar(text, after))
        raise InvalidRequest("a grammar is described by its text and json_after")

    def _read_vocabulary(self) -> "tuple[llguidance.LLTokenizer, _Vocabulary]":
        if self._vocabulary is None:
            eos = sorted(self._tokenizer.eos_ids)
            if not eos:
                raise InvalidRequest("the model has no end token, so no grammar can end its answers")
            vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, eos[0])
            wrapper = llguidance.TokenizerWrapper(vocabulary)
            library = llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=eos)
            self._vocabulary = library, vocabulary
        return self._vocabulary


class _Vocabulary:
    """A tokenizer with the interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: int) -> None:
        self.eos_token_id, self.bos_token_id = eos, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id, skip_special=False) for id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"), add_bos=False, parse_special=False)

    def texts(self) -> list[bytes]:
        """The bytes of each token; special tokens have none."""
        special = set(self.special_token_ids)
        return [b"" if id in special else token for id, token in enumerate(self.tokens)]


def json_schema(schema: Mapping[str, Any], strict: bool = True, warnings: list[str] | None = None) -> Grammar:
    """The grammar of texts that satisfy a schema.

    Args:
        schema: in any draft from 4 on.
        strict: whether all of the schema must be enforced. Otherwise keywords that cannot be are skipped.
        warnings: takes a line for each keyword that is skipped.

    Raises:
        InvalidRequest: the schema is strict and cannot be guaranteed. Names the keyword and its JSON pointer.
    """
    read = enforced_schema(schema, strict)
    if warnings is not None:
        warnings += read.warnings
    return Grammar(grammar_of(read.schema), "" if read.open_objects else None)


def embedded_schema(
    schema: Mapping[str, Any], strict: bool = True, warnings: list[str] | None = None, *, objects: bool = False
) -> dict[str, Any]:
    """A schema for `%json` within a grammar, which enforces what `json_schema` does, except for keys that differ.

    `objects`: of what satisfies the schema, only objects are allowed.
    """
    read = enforced_schema(schema, strict, objects=objects)
    if warnings is not None:
        warnings += read.warnings
    return with_layout(read.schema)


def regex(pattern: str) -> str:
    """The grammar of a regular expression that matches the whole answer.

    It is read as `re.fullmatch` reads it, with ASCII digits, letters and spaces for `\\d`, `\\w` and `\\s`. What Python
    does not know (`[[:alpha:]]`), or has only with flags, is read in the syntax of Rust's regex crate.

    Raises InvalidRequest for one that is too long.
    """
    if len(pattern) > MAX_REGEX_CHARACTERS:
        raise InvalidRequest(f"a regular expression of more than {MAX_REGEX_CHARACTERS:,} characters is too large")
    if "[:" not in pattern:
        with contextlib.suppress(Untranslatable):
            pattern = translate(without_anchors(pattern))
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    """The grammar of a few fixed texts. Raises InvalidRequest for too many, or for one that is no Unicode."""
    if len(options) > MAX_CHOICES:
        raise InvalidRequest(f"a choice of more than {MAX_CHOICES:,} texts is too large")
    for place, option in enumerate(options):
        if any("\ud800" <= sign < "\ue000" for sign in option):
            raise InvalidRequest(f"text {place} has half of a surrogate pair, which is no character")
    escaped = ("".join(map(_escaped, option)) for option in dict.fromkeys(options))
    return llguidance.LLMatcher.grammar_from_regex("|".join(escaped))


def _escaped(sign: str) -> str:
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{ord(sign):x}}}"


def lark(text: str) -> str:
    """The grammar that a client wrote in llguidance's Lark, or in llama.cpp's GBNF. Raises InvalidRequest."""
    try:
        return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises what it meets
        raise InvalidRequest(f"not a grammar: {_one_line(str(error))}") from None


def _one_line(text: str) -> str:
    """What an error says, without the source and the state that follow."""
    text = re.split(r"<state>|<non-verbose/>|\n\s*\d+ \| ", text)[0]
    return " ".join(text.split())[:300]
