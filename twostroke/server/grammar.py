"""Grammars by llguidance: JSON schemas, regular expressions, choices and tool calls as constraints on tokens."""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.errors import InvalidRequest
from twostroke.sampling.constraint import Constraint, ConstraintFactory

REMEMBERED = 64  # compiled grammars
# The layout of json.dumps, which models know well. With free whitespace, a weak model may write nothing else.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarConstraint(Constraint):
    """A matcher that follows one choice."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(bool)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


class Grammars:
    """Compiles grammars for one tokenizer and remembers those used lately. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's, which may be padded past the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> ConstraintFactory:
        """Raises InvalidRequest for a grammar that is wrong or too large."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = llguidance.LLMatcher(self._read_vocabulary(), grammar, log_level=0)
                if matcher.is_error():
                    raise InvalidRequest(f"not a grammar that can be followed: {_first_line(matcher.get_error())}")
                self._compiled[grammar] = matcher
                if len(self._compiled) > REMEMBERED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
        return lambda: GrammarConstraint(matcher.deep_copy())

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            eos = sorted(self._tokenizer.eos_ids)
            if not eos:
                raise InvalidRequest("the model has no end token, so no grammar can end its answers")
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, eos[0]))
            self._vocabulary = llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=eos)
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


def json_schema(schema: Mapping[str, Any], strict: bool = True) -> str:
    """The grammar of a schema's instances. Keywords that llguidance does not know are refused if `strict`."""
    return llguidance.LLMatcher.grammar_from_json_schema(with_options(schema, strict))


def with_options(schema: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """A schema with the layout of its JSON fixed."""
    return {**schema, "x-guidance": {**JSON_OPTIONS, "lenient": not strict}}


def regex(pattern: str) -> str:
    """The grammar of a regular expression, in the syntax of Rust's regex crate, matching the whole answer."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    """The grammar of a few fixed texts."""
    return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, options)))


def lark(text: str) -> str:
    """A grammar in Lark's syntax as llguidance has it, or in GBNF (llama.cpp). Raises InvalidRequest."""
    try:
        return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:
        raise InvalidRequest(f"grammar must be in Lark or GBNF: {_first_line(str(error))}") from None


def _first_line(text: str) -> str:
    return " ".join(text.split())[:300]
