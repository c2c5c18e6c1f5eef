"""The tokenizer that a GGUF file's metadata describes, as a `tokenizers.Tokenizer` without a post-processor."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from twostroke.checkpoints.checkpoint import GgufTokenizerSource
from twostroke.errors import CheckpointError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`; a token of any type can be decoded."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level BPE splits text before merging; merges never cross a split.

    Without `regex` the split is GPT-2's. `digits` isolates every digit first. With `ignore_merges` a piece that is in
    the vocabulary is one token, even if the merges do not produce it.
    """

    regex: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The splits, then the map from bytes to printable characters."""
        if self.regex is not None:
            first = pre_tokenizers.Split(Regex(self.regex), behavior="isolated")
            return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]) if self.digits else gpt2


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PRE = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}


def build_backend(source: GgufTokenizerSource) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describe. Raises CheckpointError for a kind that is not supported."""
    model = source.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level_bpe(source)
    if model == "llama":
        return _sentencepiece_bpe(source)
    raise CheckpointError(f"{source.path}: tokenizer.ggml.model is {model!r}; Twostroke knows 'gpt2' and 'llama'")


def adds_bos(source: GgufTokenizerSource) -> bool:
    """Whether a prompt begins with BOS, as the file states it, else the default of its kind of tokenizer."""
    stated = source.metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    return source.metadata["tokenizer.ggml.model"] == "llama" or _pre_tokenizer(source).add_bos


def _pre_tokenizer(source: GgufTokenizerSource) -> PreTokenizer:
    name = source.metadata.get("tokenizer.ggml.pre")
    if name in (None, "default") and source.metadata.get("general.architecture") == "gpt2":
        name = "gpt-2"  # files of GPT-2 itself that are older than the key
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{source.path}: tokenizer.ggml.pre is {name!r}; Twostroke knows {known}")
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(source: GgufTokenizerSource) -> Tokenizer:
    pre = _pre_tokenizer(source)
    tokens, types = _vocabulary(source)
    try:
        merges = [(left, right) for left, right in (merge.split(" ") for merge in _required(source, "merges"))]
    except ValueError:
        raise CheckpointError(f"{source.path}: an entry of tokenizer.ggml.merges is not a pair of tokens") from None
    backend = _bpe(source, tokens, merges, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, types, normalized=False)
    return backend


def _sentencepiece_bpe(source: GgufTokenizerSource) -> Tokenizer:
    tokens, types = _vocabulary(source)
    scores = np.asarray(_required(source, "scores"), np.float32)
    unknown = source.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if len(scores) != len(tokens) or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{source.path}: tokenizer.ggml.scores or .unknown_token_id does not fit the vocabulary")
    merges = _merges_by_score(tokens, types, scores)
    backend = _bpe(source, tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    spaces, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = bool(source.metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    # SentencePiece matches user-defined symbols in normalized text, where a space and a literal "▁" are equal. With a
    # space prefix this is not possible: the normalizer would put the prefix before the symbols' text too.
    _add_tokens(backend, tokens, types, normalized=not prefix)
    return backend


def _merges_by_score(tokens: list[str], types: list[int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Merge rules equivalent to SentencePiece, which joins the neighbours whose joint piece has the highest score.

    Every split of a piece into two pieces becomes a rule, in descending order of the piece's score. The order among
    the splits of one piece has no effect: merges inside a piece's span proceed as if the piece were alone, so only one
    of its splits is ever applied. Distinct pieces of equal score are ordered by id here, from left to right in
    SentencePiece; its trainer makes no such pieces.
    """
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    merges: list[tuple[str, str]] = []
    for index in np.argsort(-scores, kind="stable").tolist():
        if types[index] == TokenType.NORMAL:
            piece = tokens[index]
            for cut in range(1, len(piece)):
                if (left := piece[:cut]) in normal and (right := piece[cut:]) in normal:
                    merges.append((left, right))
    return merges


def _bpe(source: GgufTokenizerSource, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{source.path}: tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} duplicates")
    try:
        return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{source.path}: the tokenizer's merges do not fit its vocabulary: {error}") from None


def _add_tokens(backend: Tokenizer, tokens: list[str], types: list[int], *, normalized: bool) -> None:
    """Add tokens that are matched whole in the text; control tokens only if special tokens are parsed."""
    typed = list(zip(tokens, types, strict=True))
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text, t in typed if t in special])
    user = [text for text, kind in typed if kind == TokenType.USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=normalized, special=False) for text in user])


def _vocabulary(source: GgufTokenizerSource) -> tuple[list[str], list[int]]:
    tokens = list(_required(source, "tokens"))
    types = np.asarray(_required(source, "token_type")).tolist()
    if len(types) != len(tokens):
        raise CheckpointError(f"{source.path}: {len(tokens)} tokenizer.ggml.tokens but {len(types)} token types")
    return tokens, types


def _required(source: GgufTokenizerSource, key: str) -> Any:
    value = source.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise CheckpointError(f"{source.path}: tokenizer.ggml.{key} is missing")
    return value
